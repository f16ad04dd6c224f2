"""The program of `dataload demo`, which checks the library's promises on one machine.

It writes a dataset of digits, serves it as S3 and trains with two ranks under torchrun through the cache. The server
counts the bytes that it sends.
"""

from __future__ import annotations

import hashlib
import json as jsonlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import numpy as np
import platformdirs
from rich.console import Console
from rich.filesize import decimal

from dataload.benchmarks.origin import Origin
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
from dataload.demo.worker import Job, held_out_file, history_file, row_ids_file
from dataload.errors import DataloadError
from dataload.runtime.child_process import as_child

BUCKET = "dataload-demo"
RANKS = 2
EPOCHS = 3
GLOBAL_BATCH = 256
SHUTDOWN_TIMEOUT = 15  # seconds between SIGTERM and SIGKILL of the ranks


def run_demo(
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    keep: bool = False,
    rows: int = 50_000,
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
        shuffled_labels: Train on random labels as a control: the model must not learn.
        seed: Seed of the dataset, the shuffle and the model.
        json: Print one JSON object instead of a table.

    Returns:
        The figures and promises.

    Raises:
        DataloadError: A rank failed.
    """
    console = Console(quiet=json)
    with signals_as_exit(), ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="dataload-demo-")))
        folder = Path(cache_dir or (platformdirs.user_cache_path("dataload-demo") if keep else scratch))
        folder.mkdir(parents=True, exist_ok=True)
        if not keep:
            folder = Path(stack.enter_context(TemporaryDirectory(dir=folder, prefix="dataload-demo-cache-")))
        result = _train_and_check(console, scratch, folder, rows, shuffled_labels=shuffled_labels, seed=seed)
    if json:
        print(jsonlib.dumps({**asdict(result), "accuracy": result.accuracy, "problems": result.problems}))  # noqa: T201
    else:
        show(result, console)
    return result


def _train_and_check(
    console: Console, scratch: Path, cache_dir: Path, rows: int, *, shuffled_labels: bool, seed: int
) -> Result:
    """Write a dataset, serve it, train on it and check the promises."""
    started = time.monotonic()
    with console.status("writing the dataset"):
        path, dataset_bytes = write_dataset(scratch / "s3", rows, shuffled_labels=shuffled_labels, seed=seed)
        _, held_out = dataset.load_split(seed)
        np.savez(held_out_file(scratch), images=held_out.images, labels=held_out.labels)
    console.print(f"Serving {rows:,} images of digits, {decimal(dataset_bytes)} of Parquet, as S3 on this machine.")
    whole = held_bytes(cache_dir, path) >= dataset_bytes
    state = "the kept" if whole else "an empty"
    console.print(f"Training a small network on them: {RANKS} ranks, {EPOCHS} epochs, {state} cache.")
    # A kept cache must recognise the files of the next run.
    with Origin(scratch / "s3", content_etags=True) as server:
        job = Job(
            url=f"s3://{path}",
            storage_options=server.storage_options,
            stats_url=server.stats_url,
            cache_dir=str(cache_dir),
            cache_bytes=max(10**9, 3 * dataset_bytes),
            scratch=str(scratch),
            epochs=EPOCHS,
            batch_size=GLOBAL_BATCH // RANKS,
            seed=seed,
        )
        with console.status(f"training {RANKS} ranks for {EPOCHS} epochs"):
            run_ranks(job)
        history = jsonlib.loads(history_file(scratch).read_text())
        epochs = read_epochs(history, server.stats())
    orders = [
        np.concatenate([np.load(row_ids_file(scratch, epoch, rank)) for rank in range(RANKS)])
        for epoch in range(EPOCHS)
    ]
    promises = [
        *traffic_promises(epochs, dataset_bytes, whole=whole),
        *order_promises(orders, rows),
        accuracy_promise(epochs[-1].accuracy, shuffled_labels=shuffled_labels),
    ]
    digests = [order_digest(order) for order in orders]
    return Result(rows, dataset_bytes, epochs, digests, promises, time.monotonic() - started)


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Turn SIGTERM, and the SIGHUP of a closed terminal, into SystemExit, so that every clean-up runs.

    Ignored signals stay ignored: `nohup` ignores SIGHUP.
    """

    def leave(number: int, _: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # A shell repeats the SIGHUP, which would interrupt the clean-up.
        sys.exit(128 + number)

    known = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in known.items() if handler != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, leave)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_dataset(folder: Path, rows: int, *, shuffled_labels: bool, seed: int) -> tuple[str, int]:
    """Write the training files to a bucket in `folder`.

    The name of their folder is a digest of the files, so that a kept cache never returns other content.

    Returns:
        The path of the files at the server, and their bytes.
    """
    files = dict(dataset.files(rows, shuffled_labels=shuffled_labels, seed=seed))
    digest = hashlib.blake2b(digest_size=6)
    for content in files.values():
        digest.update(content)
    path = f"{BUCKET}/{digest.hexdigest()}"
    (folder / path).mkdir(parents=True)
    for name, content in files.items():
        (folder / path / name).write_bytes(content)
    return path, sum(map(len, files.values()))


def held_bytes(cache_dir: Path, path: str) -> int:
    """Return the cached bytes of the objects below `path`."""
    if not (cache_dir / "FORMAT").exists():
        return 0
    folder = open_existing(cache_dir)
    held = sum(row.size for row in folder.index.rows() if row.name.startswith(path))
    folder.close()
    return held


def run_ranks(job: Job) -> None:
    """Run the ranks under torchrun until they exit. No rank outlives the call.

    Raises:
        DataloadError: A rank failed.
    """
    scratch = Path(job.scratch)
    (scratch / "job.json").write_text(jsonlib.dumps(asdict(job)))
    command = [sys.executable, *as_child("torch.distributed.run", f"--nproc-per-node={RANKS}")]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += as_child("dataload.demo.worker", str(scratch / "job.json"))
    local = {"GLOO_SOCKET_IFNAME": "lo", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    local |= {"OMP_NUM_THREADS": "1", "TMPDIR": job.scratch}  # torchrun's logs are removed with the scratch folder
    # PET_NNODES and others are options of torchrun for the job that this machine is a node of.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    log = scratch / "ranks.log"
    with log.open("wb") as output:
        # A new session: Ctrl-C reaches this process only, which then stops the ranks.
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=own | local,
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
