"""Arrow IPC through the cache, files (Feather too) and streams: each record batch is a row group.

Notes: the formats are defined in
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
and its Message.fbs and File.fbs.
"""
