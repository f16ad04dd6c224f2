"""Decoded rows: records in the cache, decoded once a host and gathered by every epoch."""
