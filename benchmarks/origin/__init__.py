"""A read-only S3 server for measurements, in its own process, with configurable latency, bandwidth and faults.

`with Origin(folder) as origin:` starts it; `python -m dataload.benchmarks.origin FOLDER` runs it by hand. The
subfolders of the folder are the buckets, and the files below them are the objects. Symbolic links are ignored.

`GET /__stats` returns the counters as JSON and `POST /__reset` sets them to zero. `GET /__behaviour` returns the
behaviour. `PUT /__behaviour` replaces it by its JSON body and restarts the sequence of faults.
"""

from __future__ import annotations

from dataload.benchmarks.origin.behaviour import Behaviour as Behaviour
from dataload.benchmarks.origin.client import Origin as Origin

__all__ = ["Behaviour", "Origin"]
