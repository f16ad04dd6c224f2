"""The program of `dataload demo`, which checks the library's promises on one machine.

It starts an S3 server, writes a dataset of digits to it and trains with two ranks under torchrun through the cache.
The server counts the bytes that it sends.
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
SHUTDOWN_TIMEOUT = 15  # seconds between SIGTERM and SIGKILL of the ranks


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
    """Run the demo and print its result. Remove every process and file afterwards, except a kept cache.

    Args:
        cache_dir: Folder of the cache. Default: a temporary folder, or the user's cache folder with `keep`.
        keep: Keep the cache, so that a second run fetches nothing. Otherwise a temporary cache inside `cache_dir`
            is used.
        rows: Rows of the dataset.
        epochs: Epochs of training.
        shuffled_labels: Train on random labels as a control: the model must not learn.
        seed: Seed of the dataset, the shuffle and the model.
        json: Print one JSON object instead of a table.

    Returns:
        The figures and promises.

    Raises:
        DataloadError: A rank failed.
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
        with console.status("writing the dataset to a local S3 server"):
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
    """Turn SIGTERM into SystemExit, so that every clean-up runs. Only the main thread can set the handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def put_dataset(server: S3Server, scratch: Path, rows: int, *, shuffled_labels: bool, seed: int) -> tuple[str, int]:
    """Write the training files to the server and the held-out digits to `scratch`.

    The name of the folder is a digest of the files, so that a kept cache never returns other content.

    Returns:
        The URL of the folder and the bytes of its files.
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
    """Return the cached bytes of the objects below `url`."""
    if not (cache_dir / "FORMAT").exists():
        return 0
    folder = open_existing(cache_dir)
    held = sum(row.size for row in folder.index.rows() if row.name.startswith(url.removeprefix("s3://")))
    folder.close()
    return held


def run_ranks(job: Job) -> None:
    """Run the ranks under torchrun until they exit. No rank outlives the call.

    Raises:
        DataloadError: A rank failed.
    """
    scratch = Path(job.scratch)
    job.write(scratch / "job.json")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["-m", "dataload.demo.worker", str(scratch / "job.json")]
    local = {"GLOO_SOCKET_IFNAME": "lo", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    local |= {"OMP_NUM_THREADS": "1", "TMPDIR": job.scratch}  # torchrun's logs are removed with the scratch folder
    log = scratch / "ranks.log"
    with log.open("wb") as output:
        # A new session: Ctrl-C reaches this process only, which then stops the ranks.
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | local,
            start_new_session=True,
        )
        with _terminated(launcher):
            code = launcher.wait()
    if code:
        raise DataloadError(f"the demo's ranks failed: {failure(log.read_text(errors='replace'), code)}")


@contextmanager
def _terminated(launcher: subprocess.Popen[bytes]) -> Iterator[None]:
    """Terminate torchrun when the block ends. It forwards SIGTERM to the ranks, which do not outlive it."""
    try:
        yield
    finally:
        launcher.terminate()
        try:
            launcher.wait(SHUTDOWN_TIMEOUT)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def failure(log: str, code: int) -> str:
    """Return the first error in torchrun's output, or the exit code of a rank or of torchrun."""
    if error := re.search(r"^(\[rank\d+\]: )?([\w.]+\.[A-Z]\w+|\w+Error): .+$", log, re.MULTILINE):
        return error[0]
    if exited := re.search(r"exitcode: (-?\d+)\) local_rank: (\d+)", log):
        return f"rank {exited[2]} exited with code {exited[1]}"
    return f"torchrun exited with code {code}"
