"""`dataload demo`: the whole path on one machine, and whether each promise was kept.

An S3 server, a dataset of digits on it, two ranks under torchrun that train through the cache, and the server's own
count of what it sent.
"""

from __future__ import annotations

import hashlib
import json as jsonlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import boto3
import numpy as np
import platformdirs
from botocore.config import Config  # type: ignore[import-untyped]
from rich.console import Console

from dataload.cache.local.fsck import open_existing
from dataload.demo import dataset
from dataload.demo.checks import (
    Result,
    accuracy_promise,
    order_digest,
    order_promises,
    read_epochs,
    show,
    traffic_promises,
)
from dataload.demo.server import S3Server
from dataload.demo.worker import Job, held_out_file, history_file, row_ids_file
from dataload.errors import DataloadError

BUCKET = "dataload-demo"
RANKS = 2
GLOBAL_BATCH = 256
PATIENCE = 15  # seconds for the ranks to end when told to


def run_demo(
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    keep: bool = False,
    rows: int = 50_000,
    epochs: int = 3,
    shuffled_labels: bool = False,
    seed: int = 0,
    json: bool = False,
) -> Result:
    """Runs the demo, prints its figures (as a table, or as one JSON object) and returns them.

    cache_dir: where the cache is; default: a temporary folder, or with `keep` the user's cache folder.
    keep: the cache stays, so that a second run fetches nothing; else it is made inside `cache_dir` and removed.
    shuffled_labels: the control: labels at random, so that the model must fail.

    Nothing that was started or written outlives the call, but for a kept cache. Raises DataloadError when a rank fails.
    """
    console = Console(quiet=json)
    started = time.monotonic()
    with sigterm_as_exit(), ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="dataload-demo-")))
        folder = Path(cache_dir or (platformdirs.user_cache_path("dataload-demo") if keep else scratch))
        folder.mkdir(parents=True, exist_ok=True)
        if not keep:
            folder = Path(stack.enter_context(TemporaryDirectory(dir=folder, prefix="dataload-demo-cache-")))
        server = stack.enter_context(S3Server())
        with console.status("writing the dataset to an S3 server on this machine"):
            url, dataset_bytes = put_dataset(server, scratch, rows, shuffled_labels=shuffled_labels, seed=seed)
        whole = held_bytes(folder, url) >= dataset_bytes
        job = Job(
            url=url,
            storage_options=server.storage_options,
            stats_url=server.stats_url,
            cache_dir=str(folder),
            cache_bytes=max(10**9, 3 * dataset_bytes),
            scratch=str(scratch),
            epochs=epochs,
            batch_size=GLOBAL_BATCH // RANKS,
            seed=seed,
        )
        server.reset()
        with console.status(f"training {RANKS} ranks for {epochs} epochs"):
            run_ranks(job)
        history = jsonlib.loads(history_file(scratch).read_text())
        orders = [
            np.concatenate([np.load(row_ids_file(scratch, epoch, rank)) for rank in range(RANKS)])
            for epoch in range(epochs)
        ]
        figures = read_epochs(history, server.stats())
    promises = [
        *traffic_promises(figures, dataset_bytes, whole=whole),
        *order_promises(orders, rows),
        accuracy_promise(figures[-1].accuracy, shuffled_labels=shuffled_labels),
    ]
    digests = [order_digest(order) for order in orders]
    result = Result(rows, dataset_bytes, figures, digests, promises, time.monotonic() - started)
    if json:
        print(jsonlib.dumps({**asdict(result), "accuracy": result.accuracy, "problems": result.problems}))  # noqa: T201
    else:
        show(result, console)
    return result


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM leaves by way of every clean-up, as Ctrl-C does; only a program's main thread may ask for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def put_dataset(server: S3Server, scratch: Path, rows: int, *, shuffled_labels: bool, seed: int) -> tuple[str, int]:
    """Writes the training files to the server and the held-out digits to `scratch`; (URL of the folder, bytes).

    The folder is named by the files' content, so that a kept cache is asked for these bytes and no others.
    """
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.storage_options["key"],
        aws_secret_access_key=server.storage_options["secret"],
        region_name="us-east-1",
        config=Config(proxies={}),
    )
    files = dict(dataset.files(rows, shuffled_labels=shuffled_labels, seed=seed))
    digest = hashlib.blake2b(digest_size=6)
    for content in files.values():
        digest.update(content)
    client.create_bucket(Bucket=BUCKET)
    for name, content in files.items():
        client.put_object(Bucket=BUCKET, Key=f"{digest.hexdigest()}/{name}", Body=content)
    client.close()
    _, held_out = dataset.load_split(seed)
    np.savez(held_out_file(scratch), images=held_out.images, labels=held_out.labels)
    return f"s3://{BUCKET}/{digest.hexdigest()}", sum(map(len, files.values()))


def held_bytes(cache_dir: Path, url: str) -> int:
    """Bytes that the cache holds of the objects below `url`."""
    if not (cache_dir / "FORMAT").exists():
        return 0
    folder = open_existing(cache_dir)
    held = sum(row.size for row in folder.index.rows() if row.name.startswith(url.removeprefix("s3://")))
    folder.close()
    return held


def run_ranks(job: Job) -> None:
    """The ranks under torchrun, to their end. Raises DataloadError when one fails; none is left, whatever happens."""
    scratch = Path(job.scratch)
    job.write(scratch / "job.json")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["-m", "dataload.demo.worker", str(scratch / "job.json")]
    local = {"GLOO_SOCKET_IFNAME": "lo", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    local |= {"OMP_NUM_THREADS": "1", "TMPDIR": job.scratch}  # torchrun's own logs go when the scratch folder goes
    log = scratch / "ranks.log"
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the ranks in order.
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | local,
            start_new_session=True,
        )
        with _ended(launcher):
            code = launcher.wait()
    if code:
        raise DataloadError(f"the demo's ranks failed: {failure(log.read_text(errors='replace'), code)}")


@contextmanager
def _ended(launcher: subprocess.Popen[bytes]) -> Iterator[None]:
    """On leaving, torchrun and the ranks are gone: it passes SIGTERM on to them, and they do not outlive its death."""
    try:
        yield
    finally:
        launcher.terminate()
        try:
            launcher.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def failure(log: str, code: int) -> str:
    """What went wrong first, by torchrun's output and exit code."""
    if error := re.search(r"^(\[rank\d+\]: )?([\w.]+\.[A-Z]\w+|\w+Error): .+$", log, re.MULTILINE):
        return error[0]
    if ended := re.search(r"exitcode: (-?\d+)\) local_rank: (\d+)", log):
        return f"rank {ended[2]} ended with code {ended[1]}"
    return f"torchrun ended with code {code}"
