"""An S3 server on this machine with data for the README's first program: images of 28 x 28 pixels, and labels."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataload.benchmarks.origin import Origin
from dataload.demo.dataset import SIDE, augmented, load_split
from dataload.demo.runner import signals_as_exit

FILES = 8
PIXELS = 28 * 28


def serve_until_interrupt(rows: int, seed: int, started: Callable[[dict[str, str]], object]) -> None:
    """Serve digits at s3://bucket/train/ until Ctrl-C, SIGTERM or SIGHUP, and remove them then.

    Args:
        rows: Number of rows.
        seed: Seed of the digits.
        started: Called with the environment variables of the server.
    """
    with signals_as_exit(), suppress(KeyboardInterrupt), TemporaryDirectory(prefix="dataload-demo-") as scratch:
        folder = Path(scratch, "bucket", "train")
        folder.mkdir(parents=True)
        for number, table in enumerate(augmented(load_split(seed)[0], rows, FILES, seed=seed)):
            large = np.asarray(table["image"].combine_chunks().values).reshape(-1, SIDE, SIDE)
            images = pa.FixedSizeListArray.from_arrays(pa.array(large[:, 4:-4:2, 4:-4:2].ravel()), PIXELS)
            pq.write_table(table.set_column(0, "image", images), folder / f"part-{number}.parquet")
        with Origin(scratch) as server:
            keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}  # It accepts any.
            started({"AWS_ENDPOINT_URL": server.endpoint_url, **keys})
            signal.pause()
