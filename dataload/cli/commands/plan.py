"""`dataload plan`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from dataload.cache.config import CacheConfig
from dataload.cli.commands.options import (
    NODES,
    BatchSize,
    Json,
    Ramp,
    Reads,
    Seed,
    ShuffleName,
    StorageOptions,
    Weights,
    WeightSchedule,
    Window,
    open_row_groups,
    shuffle_of,
    with_shared_options,
)
from dataload.cli.console import FOUND_A_PROBLEM, show, table
from dataload.errors import ConfigError
from dataload.runtime.text import counted, duration

if TYPE_CHECKING:
    from dataload.planning.forecast import Forecast, Host
    from dataload.planning.orders import Packed
    from dataload.planning.plan import Plan
    from dataload.planning.simulate import Fetched
    from dataload.rows.row_group_cache import RowGroupCache
    from dataload.samplers.mixture.order import MixtureOrder
    from dataload.samplers.mixture.weights import Weights as WeightsOfSources
    from dataload.samplers.order import Order
    from dataload.samplers.token_batches import TokenOrder

TOO_SMALL = "none: this cache is too small"


def _number(value: float | None) -> float | None:
    """Return the value. Raise BadParameter if it is negative, infinite or not a number."""
    if value is not None and not 0 <= value < math.inf:
        raise typer.BadParameter(f"{value} must be a number, zero or more")
    return value


def _positive(value: float | None) -> float | None:
    """Return the value. Raise BadParameter unless it is above 0."""
    if value == 0:
        raise typer.BadParameter("must be above 0")
    return _number(value)


@with_shared_options()
def plan(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="The dataset. Several are read as a mixture.")],
    weights: Weights = None,
    schedule: WeightSchedule = None,
    ramp: Ramp = False,
    shuffle: ShuffleName = "block",
    window: Window = None,
    batch_size: BatchSize = 256,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks that read the dataset; default: one on each node.")
    ] = None,
    seed: Seed = 0,
    num_streams: Annotated[int, typer.Option("--num-streams", "--nodes", min=1, help=NODES)] = 1,
    *,
    reads: Reads,
    pack: Annotated[
        int | None, typer.Option(min=1, help="Length of the sequences that documents are packed into: Dataset.pack.")
    ] = None,
    pack_column: Annotated[str, typer.Option(help="The column that is packed.")] = "tokens",
    split: Annotated[bool, typer.Option("--split/--no-split", help="Whether documents are cut; for --pack.")] = True,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a batch, instead of --batch-size. Reads --length.")
    ] = None,
    length: Annotated[str, typer.Option(help="The column of the lengths of rows, or of lists.")] = "tokens",
    pad_to_multiple: Annotated[int, typer.Option(min=1, help="Lengths are padded to it; for --batch-tokens.")] = 1,
    gbps: Annotated[
        float | None, typer.Option(callback=_positive, help="Gigabits per second from the origin; default: 8.")
    ] = None,
    latency_ms: Annotated[
        float | None, typer.Option(callback=_number, help="Milliseconds per request; default: 100, as S3 takes.")
    ] = None,
    price_gb: Annotated[
        float | None, typer.Option(callback=_number, help="Price of 1 GB from the origin, such as 0.09.")
    ] = None,
    price_get: Annotated[
        float | None, typer.Option(callback=_number, help="Price of 1,000 requests, such as 0.0004.")
    ] = None,
    accelerators: Annotated[
        int | None,
        typer.Option(min=1, help="Forecast how busy a job keeps so many accelerators; instead of --world-size."),
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(callback=_positive, help="Milliseconds that an accelerator computes for a batch.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the job, for --accelerators.")] = 1,
    measured: Annotated[
        Path | None,
        typer.Option(help="What `dataload doctor URL --measure FILE` wrote on such a node, for --accelerators."),
    ] = None,
    cache: CacheConfig,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Estimate bytes, requests and time before reading a dataset."""
    from dataload.planning.forecast import TYPICAL_BYTES, Job
    from dataload.planning.orders import packed_of, token_batches_of
    from dataload.planning.plan import plan as make_plan
    from dataload.rows.known_nulls import ON_THE_COMMAND_LINE
    from dataload.rows.packing import Packing

    if len(set(urls)) < len(urls):
        raise ConfigError("the same URL twice: name it once, with the sum of its weights")
    for option, given in (("--pack", pack), ("--batch-tokens", batch_tokens)):
        if given is not None and len(urls) > 1:
            raise ConfigError(f"{option} is for one URL: plan the sources of a mixture one by one")
    world_size = _world_size(world_size, num_streams, accelerators, step_ms, in_parts=shuffle != "none")
    host = _host(measured, gbps, latency_ms)
    shares = _shares(urls, weights, schedule, ramp=ramp)
    unlimited = replace(cache, cache_bytes=None)  # A cache that is opened with a limit evicts what exceeds it.
    sources = [open_row_groups(url, storage_options, unlimited, reads, quiet=as_json) for url in urls]
    options: dict[str, Any] = {"shuffle": shuffle_of(shuffle), "seed": seed, "num_streams": num_streams}
    if batch_tokens is not None:
        options["num_streams"] = 1  # Each node reads all of the dataset.
    packed = None if pack is None else packed_of(sources[0], Packing(pack, pack_column, split=split))
    order = _order(urls, sources, shares, packed=packed, window=window, **options)
    batches, rows = None, batch_size * world_size
    if batch_tokens is not None:
        batches = token_batches_of(sources[0], order, batch_tokens, length, pad_to_multiple, world_size)
        rows = batches.borders(0)[1]  # A batch may need all row groups of its plan window.
    local_world_size = math.ceil(world_size / num_streams)
    job = None
    if accelerators is not None and step_ms is not None and order.n:
        if measured is None:
            row_bytes = max(blobs.row_bytes for blobs in sources)
            host = replace(host, rows_per_second=min(host.rows_per_second, TYPICAL_BYTES / max(1, row_bytes)))
        steps = batches.batches(0) // world_size if batches else math.ceil(order.n / rows)
        job = Job(accelerators, num_streams, step_ms, max(1, steps), order.n, epochs, host)
    result = make_plan(
        sources,
        order,
        rows,
        local_world_size=local_world_size,
        nodes=num_streams,
        host=host,
        price_gb=price_gb,
        price_get=price_get,
        cache_bytes=cache.limit,
        job=job,
    )
    is_whole = sources[0].manifest.selection is None
    result = replace(result, **_tokens(packed, batches, world_size, from_footers=split and is_whole))
    nulls = [f"{found}: {ON_THE_COMMAND_LINE}" for blobs in sources if (found := blobs.maker.known_nulls)]
    result = replace(result, advice=(*nulls, *result.advice))
    show(asdict(result), table(lines(result)), as_json=as_json)
    if result.first_epoch is None or nulls:
        raise typer.Exit(FOUND_A_PROBLEM)


def _world_size(
    world_size: int | None, nodes: int, accelerators: int | None, step_ms: float | None, *, in_parts: bool
) -> int:
    """Return the number of ranks. Raise ConfigError if it contradicts the number of nodes, or of accelerators."""
    if (accelerators is None) != (step_ms is None):
        raise ConfigError("a forecast needs both --accelerators and --step-ms")
    if accelerators is not None and world_size not in (None, accelerators):
        raise ConfigError(f"--accelerators={accelerators} have a rank each: leave out --world-size={world_size}")
    ranks = accelerators or world_size or nodes
    if ranks < nodes or (in_parts and ranks % nodes):
        raise ConfigError(f"--num-streams={nodes}: nodes with equal parts of --world-size={ranks} ranks are impossible")
    return ranks


def _host(measured: Path | None, gbps: float | None, latency_ms: float | None) -> Host:
    """Return the speed of the host that --measured names, or of a typical one, with what is known besides."""
    from dataload.planning.forecast import TYPICAL, Host

    host = TYPICAL
    if measured is not None:
        try:
            host = Host(**json.loads(measured.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"--measured={measured} must be what `dataload doctor URL --measure FILE` wrote: {error}"
            ) from error
    host = host if gbps is None else replace(host, gbps=gbps)
    return host if latency_ms is None else replace(host, latency_ms=latency_ms)


def _shares(urls: list[str], weights: str | None, schedule: str | None, *, ramp: bool) -> WeightsOfSources | None:
    """Return the weights of --weights and --schedule. Raise ConfigError unless they have one for each URL."""
    from dataload.samplers.mixture.weights import knots, weights_of

    if weights is None and schedule is None and not ramp:
        return None
    try:
        given = None if weights is None else [Fraction(text) for text in weights.split(",")]
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"--weights={weights} must be numbers, separated by commas") from error
    try:
        rows = None if schedule is None else {int(row): each for row, each in json.loads(schedule).items()}
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"--schedule={schedule} must be JSON: rows and lists of weights") from error
    found = weights_of(given, rows, ramp=ramp)
    if (count := len(knots(found).weights[0])) != len(urls):
        option = f"--schedule={schedule}" if weights is None else f"--weights={weights}"
        raise ConfigError(f"{option}: {count} weights for {len(urls)} URLs: give one for each")
    return found


def _tokens(packed: Packed | None, batches: TokenOrder | None, ranks: int, *, from_footers: bool) -> dict[str, Any]:
    """Return what a plan says of the tokens of packed documents, or of the batches of a token budget."""
    if packed is not None:
        tokens = int(packed.values.sum())
        return {"tokens": tokens, "padding_share": packed.padding_share, "reads_lengths": not from_footers}
    if batches is None:
        return {}
    tokens, padding = batches.tokens_of_epoch(0)
    share = padding / max(1, tokens + padding)
    found = {"tokens": tokens, "padding_share": share, "reads_lengths": True}
    return {**found, "batches": -(-batches.batches(0) // ranks)}


def _order(
    urls: list[str],
    sources: list[RowGroupCache],
    shares: WeightsOfSources | None,
    *,
    packed: Packed | None,
    **options: Any,
) -> Order | MixtureOrder:
    """Return the order of a dataset, or of a mixture of several."""
    from dataload.catalog.same_columns import check_same_columns
    from dataload.planning.orders import order_of, order_of_mixture

    manifests = [blobs.manifest for blobs in sources]
    if len(urls) == 1:
        return order_of(manifests[0], packed=packed, **options)
    layouts = [blobs.plan.layout for blobs in sources]
    check_same_columns(urls, layouts, [manifest.schema for manifest in manifests])
    return order_of_mixture(manifests, shares, **options)


def lines(plan: Plan) -> list[tuple[str, str]]:
    """Return the (label, text) lines of a plan."""
    rate = f"{plan.gbps:g} Gbit/s and {plan.latency_ms:g} ms a request"
    row = "row" if plan.tokens is None or plan.batches is not None else "sequence"
    rows = f"{counted(plan.rows, row)} in {counted(plan.row_groups, 'row group')}"
    about = "about " if plan.is_estimate else ""
    part = "all of it" if plan.nodes == 1 or plan.shuffle is False else "the part of a node"
    first = f"waits for {_fetched(plan.first_batch)}, {duration(plan.first_batch_seconds)} with the footers"
    return [
        ("dataset", f"{counted(plan.objects, 'object')}, {decimal(plan.bytes)}; {rows}"),
        *_epoch(plan),
        ("decoded", f"{about}{decimal(plan.decoded_bytes)}"),
        (
            "cache",
            f"{about}{decimal(plan.cache_bytes_needed)} hold {part}; the limit is {decimal(plan.cache_bytes)}",
        ),
        *([] if plan.nodes == 1 else [("nodes", f"{plan.nodes}; the lines below are for each, costs for all of them")]),
        ("footers", _fetched(plan.footers)),
        ("first batch", first if plan.rows else "none: there are no rows"),
        ("first epoch", _first_epoch(plan, rate)),
        ("later epochs", _later_epochs(plan)),
        *_window(plan, f"{about}{decimal(plan.held_bytes)} decoded"),
        (
            "memory",
            f"{decimal(plan.memory_bytes)} at most for row groups in flight or being decoded, for all ranks of a host",
        ),
        ("shuffle", _shuffle(plan)),
        *_forecast(plan.forecast),
        *(("advice" if not number else "", line) for number, line in enumerate(plan.advice)),
    ]


def _forecast(forecast: Forecast | None) -> list[tuple[str, str]]:
    if forecast is None:
        return []
    took = f"{counted(len(forecast.epochs), 'epoch')} in {duration(forecast.seconds)}"
    first = f"the first batch after {duration(forecast.first_batch_seconds)}"
    found = [("busy", f"{forecast.busy_share:.0%} of the job: {took}, {first}{_costs(forecast.cost)}")]
    if forecast.changed_busy_share is not None:
        found.append(("", f"{forecast.changed_busy_share:.0%} with {forecast.change}"))
    return found


def _epoch(plan: Plan) -> list[tuple[str, str]]:
    if plan.batches is not None:
        what = (
            f"about {plan.batches:,} a rank and epoch, with {plan.tokens:,} tokens and {plan.padding_share:.2%} padding"
        )
        return [("batches", f"{what}; the lengths of all rows are read once before the first batch")]
    if plan.tokens is not None:
        first = "; the lengths of all documents are read once before the first batch" if plan.reads_lengths else ""
        about = "about " if plan.reads_lengths else ""
        return [("packed", f"{about}{plan.tokens:,} tokens an epoch, {about}{plan.padding_share:.2%} padding{first}")]
    if plan.weights is None and plan.epoch_rows == plan.rows:
        return []
    changes = "" if plan.weights is None else f", which {plan.weights}"
    return [("epoch", f"{plan.epoch_rows:,} rows, by the weights{changes}")]


def _window(plan: Plan, decoded: str) -> list[tuple[str, str]]:
    if plan.trade is None:
        return [] if plan.shuffle is False else [("in use", f"all row groups at a time, {decoded}")]
    windows = f"two windows, {decimal(plan.stored_bytes)} as stored and {decoded}, are in use at a time"
    return [("window", f"of {plan.trade.window:,} row groups; {windows}")]


def _shuffle(plan: Plan) -> str:
    if plan.trade is None:
        return "all rows together" if plan.shuffle else "none: rows in file order, and each node reads all of them"
    return f"variance ratio {plan.trade.variance_ratio:.2f} if rows are sorted by label (1 is uniform)"


def _first_epoch(plan: Plan, rate: str) -> str:
    if plan.first_epoch is None or plan.first_epoch_seconds is None:
        return TOO_SMALL
    costs = _costs(plan.first_epoch_cost)
    with_footers = f"with the footers {duration(plan.first_epoch_seconds)} at {rate}{costs}"
    return f"{_about(plan)}{_fetched(plan.first_epoch)}; {with_footers}"


def _later_epochs(plan: Plan) -> str:
    if plan.later_epoch is None:
        return TOO_SMALL
    bounds = ""
    if len(plan.later_epochs) > 1:
        sizes = [epoch.bytes for epoch in plan.later_epochs]
        bounds = f"; from {decimal(min(sizes))} to {decimal(max(sizes))} an epoch"
    return f"{_about(plan)}{_fetched(plan.later_epoch)}{_costs(plan.later_epoch_cost)}{bounds}"


def _about(plan: Plan) -> str:
    """Return "about " if epochs differ: a cache smaller than the dataset keeps the row groups that arrive first."""
    return "about " if len(plan.later_epochs) > 1 else ""


def _costs(cost: float | None) -> str:
    return "" if not cost else f", for {cost:,.2f}" if cost >= 1 else f", for {cost:.2g}"


def _fetched(fetched: Fetched) -> str:
    if not fetched.requests:
        return "fetch nothing"
    return f"{decimal(fetched.bytes)} in {counted(fetched.requests, 'request')}"
