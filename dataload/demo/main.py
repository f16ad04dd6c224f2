"""`dataload demo`: the whole path on one machine, and whether each promise was kept.

An S3 server, a dataset of digits on it, two ranks under torchrun that train through the cache, and the server's own
count of what it sent.
"""

from __future__ import annotations

import hashlib
import json as jsonlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import boto3
import numpy as np
import platformdirs
from botocore.config import Config  # type: ignore[import-untyped]
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from dataload.cache.fsck import open_existing
from dataload.demo import digits
from dataload.demo.rank import Job, held_out_file, history_file, row_ids_file
from dataload.demo.server import S3Server
from dataload.errors import DataloadError

BUCKET = "dataload-demo"
RANKS = 2
GLOBAL_BATCH = 256
OVERHEAD = 1.02  # bytes fetched, of the dataset's: footers, and nothing twice
LEARNED = 0.95
GUESSED = 0.2
PATIENCE = 15  # seconds for the ranks to end when told to


@dataclass(frozen=True)
class Epoch:
    """One epoch's figures over both ranks. s3_requests, s3_bytes: object GETs as the server counted them."""

    rows_per_second: float
    s3_requests: int
    s3_bytes: int
    hit_rate: float
    stall_fraction: float
    accuracy: float


@dataclass(frozen=True)
class Promise:
    """One thing the library promises: what was seen, and whether it is what was promised."""

    seen: str
    kept: bool


@dataclass
class Result:
    """What the demo saw. problems: a line for each promise not kept; empty when all is well."""

    rows: int
    dataset_bytes: int
    seconds: float = 0.0
    accuracy: float = 0.0
    epochs: list[Epoch] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [promise.seen for promise in self.promises if not promise.kept]


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
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="dataload-demo-")))
        folder = Path(cache_dir) if cache_dir else platformdirs.user_cache_path("dataload") / "demo"
        if not keep:
            folder = Path(stack.enter_context(TemporaryDirectory(dir=cache_dir, prefix="dataload-demo-cache-")))
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
        result = Result(rows, dataset_bytes)
        result.epochs = read_epochs(scratch, server)
        result.accuracy = result.epochs[-1].accuracy
        result.promises = [
            *traffic_promises(result, whole=whole),
            *order_promises(scratch, rows, epochs),
            accuracy_promise(result.accuracy, shuffled_labels=shuffled_labels),
        ]
    result.seconds = time.monotonic() - started
    if json:
        print(jsonlib.dumps({**asdict(result), "problems": result.problems}))  # noqa: T201 - the command's output
    else:
        show(result, console)
    return result


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
    files = dict(digits.files(rows, shuffled_labels=shuffled_labels, seed=seed))
    digest = hashlib.blake2b(digest_size=6)
    for content in files.values():
        digest.update(content)
    client.create_bucket(Bucket=BUCKET)
    for name, content in files.items():
        client.put_object(Bucket=BUCKET, Key=f"{digest.hexdigest()}/{name}", Body=content)
    client.close()
    _, held_out = digits.load_split(seed)
    np.savez(held_out_file(scratch), images=held_out.images, labels=held_out.labels)
    return f"s3://{BUCKET}/{digest.hexdigest()}", sum(map(len, files.values()))


def held_bytes(cache_dir: Path, url: str) -> int:
    """Bytes that the cache holds of the objects below `url`."""
    if not (cache_dir / "FORMAT").exists():
        return 0
    index = open_existing(cache_dir).index
    held = sum(row.size for row in index.rows() if row.name.startswith(url.removeprefix("s3://")))
    index.close()
    return held


def run_ranks(job: Job) -> None:
    """The ranks under torchrun, to their end. Raises DataloadError when one fails; none is left, whatever happens."""
    scratch = Path(job.scratch)
    job.write(scratch / "job.json")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["-m", "dataload.demo.rank", str(scratch / "job.json")]
    local = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
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
        raise DataloadError(f"a rank of the demo failed: {failure(log.read_text(errors='replace'))}")


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


def failure(log: str) -> str:
    """The line of torchrun's output that says what went wrong first."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\[rank\d+\]: [\w.]+: ", line)]
    exits = [line for line in lines if "exitcode" in line]
    return next(iter(errors + exits + lines[-1:]), "no output")


def read_epochs(scratch: Path, server: S3Server) -> list[Epoch]:
    """The ranks' history with the server's counts by epoch; what it sent after the last epoch's end counts to it."""
    history: list[dict[str, Any]] = jsonlib.loads(history_file(scratch).read_text())
    totals = [(0, 0), *((int(record["get_requests"]), int(record["get_bytes"])) for record in history)]
    totals[-1] = (server.stats()["get_requests"], server.stats()["get_bytes"])
    return [
        Epoch(
            rows_per_second=record["rows_per_second"],
            s3_requests=after[0] - before[0],
            s3_bytes=after[1] - before[1],
            hit_rate=record["hits"] / max(1, record["hits"] + record["misses"]),
            stall_fraction=record["stall_fraction"],
            accuracy=record["accuracy"],
        )
        for record, before, after in zip(history, totals, totals[1:], strict=False)
    ]


def traffic_promises(result: Result, *, whole: bool) -> list[Promise]:
    """Bytes leave S3 once. whole: the cache held the dataset before."""
    first, *later = result.epochs
    share = first.s3_bytes / result.dataset_bytes
    if whole:
        start = Promise(f"epoch 1 found all in the kept cache: {first.s3_requests} requests", first.s3_requests == 0)
    else:
        start = Promise(f"epoch 1 fetched {share:.3f} x the dataset (at most {OVERHEAD})", share <= OVERHEAD)
    requests = sum(epoch.s3_requests for epoch in later)
    return [start, Promise(f"later epochs sent {requests} data requests to S3 (0)", requests == 0)]


def order_promises(scratch: Path, rows: int, epochs: int) -> list[Promise]:
    """Every row exactly once an epoch over all ranks, and another order each time."""
    orders = [
        np.concatenate([np.load(row_ids_file(scratch, epoch, rank)) for rank in range(RANKS)])
        for epoch in range(epochs)
    ]
    wrong = [number for number, order in enumerate(orders, 1) if not np.array_equal(np.sort(order), np.arange(rows))]
    seen = f"not every row exactly once in epochs {wrong}" if wrong else "every row exactly once in every epoch"
    distinct = len({order.tobytes() for order in [np.arange(rows), *orders]}) - 1
    return [Promise(seen, not wrong), Promise(f"{distinct} orders in {epochs} epochs", distinct == epochs)]


def accuracy_promise(accuracy: float, *, shuffled_labels: bool) -> Promise:
    """The batches teach what is in the data: digits from true labels, nothing from shuffled ones."""
    if shuffled_labels:
        return Promise(f"shuffled labels: held-out accuracy {accuracy:.3f} (below {GUESSED})", accuracy < GUESSED)
    return Promise(f"held-out accuracy {accuracy:.3f} (at least {LEARNED})", accuracy >= LEARNED)


def show(result: Result, console: Console) -> None:
    """The figures as a table no wider than 80 columns."""
    table = Table(title=f"{result.rows:,} rows, {decimal(result.dataset_bytes)}, {RANKS} ranks")
    for heading in ("epoch", "rows/s", "S3 GETs", "S3 bytes", "x data", "hits", "stall", "accuracy"):
        table.add_column(heading, justify="right")
    for number, epoch in enumerate(result.epochs, 1):
        table.add_row(
            str(number),
            f"{epoch.rows_per_second:,.0f}",
            f"{epoch.s3_requests:,}",
            decimal(epoch.s3_bytes),
            f"{epoch.s3_bytes / result.dataset_bytes:.2f}",
            f"{epoch.hit_rate:.1%}",
            f"{epoch.stall_fraction:.1%}",
            f"{epoch.accuracy:.3f}",
        )
    console.print(table)
    for promise in result.promises:
        console.print(f"[green]kept[/]    {promise.seen}" if promise.kept else f"[red]BROKEN[/]  {promise.seen}")
    console.print(f"{result.seconds:.0f} s")
