"""`dataload rows` and `dataload replay`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataload.cache.config import CacheConfig
from dataload.cli.commands.options import Json, StorageOptions, mapping, with_shared_options
from dataload.cli.console import FOUND_A_PROBLEM, show
from dataload.cli.values import plain_value, row_text
from dataload.errors import ConfigError, DataloadError
from dataload.runtime.text import counted

if TYPE_CHECKING:
    from dataload.loader.loader import Loader
    from dataload.replay import Run, Step
    from dataload.replay.run import Batch

BLOCK_BYTES = 64 << 10  # of the few row groups that are fetched

NOT_RECORDED = "no seal and no later loop tells that the run got here"

Folder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="The stats_dir of make_loader, or the log_dir or checkpoint_dir of fit."),
]
STEP = typer.Option(min=1, help="Optimizer step, as fit counts; without fit, the batch of the run, from 1.")
LoaderName = Annotated[
    str | None,
    typer.Option(
        "--loader",
        metavar="MODULE:FUNCTION",
        help="A function of the run's program that takes a World and returns its loader; default: made by the ledger.",
    ),
]


@with_shared_options()
def rows(
    folder: Folder,
    step: Annotated[int | None, STEP] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the rows of this rank; default: all.")] = None,
    values: Annotated[bool, typer.Option("--show", help="Fetch the rows, and show their values.")] = False,
    row: Annotated[int | None, typer.Option(min=0, help="Instead of a step: when this row comes.")] = None,
    epochs: Annotated[int, typer.Option(min=0, help="With --row, epochs to look ahead after the run's last one.")] = 1,
    verify: Annotated[
        bool, typer.Option("--verify", help="Instead of a step: check the ledger's digests against the rows.")
    ] = False,
    loader: LoaderName = None,
    *,
    cache: CacheConfig,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Tell which rows a step of a run saw, by rank, file and row group."""
    if (step is not None) + (row is not None) + verify != 1:
        raise ConfigError("name one of --step, --row and --verify")
    run = _run(folder, loader, cache, storage_options)
    if verify:
        _show_verified(run, as_json=as_json)
    elif row is not None:
        _show_times(run, row, epochs, as_json=as_json)
    else:
        assert step is not None
        _show_step(run, run.step(step), rank, values=values, as_json=as_json)


@with_shared_options()
def replay(
    folder: Folder,
    step: Annotated[int, STEP],
    out: Annotated[Path, typer.Option(help="Write the batch to this file, for torch.load.")],
    rank: Annotated[int, typer.Option(min=0, help="The rank that got it.")] = 0,
    loader: LoaderName = None,
    *,
    cache: CacheConfig,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Make the batch of a step again, and save it.

    A step that accumulated several has a list of them.
    """
    import torch

    run = _run(folder, loader, cache, storage_options)
    found = run.step(step)
    source = run.loader(found.start)
    batches = [source.batch_at(batch.epoch, batch.number, rank) for batch in found.batches]
    kept, partial = [_kept(batch) for batch in batches], out.with_name(f"{out.name}.partial")
    try:
        with partial.open("wb") as file:
            torch.save(kept[0] if len(kept) == 1 else kept, file)
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from error
    missing = [] if loader else _left_out(found)
    calls = [f"loader.batch_at({batch.epoch}, {batch.number}, rank={rank})" for batch in found.batches]
    lines = [f"{out}: {', '.join(calls)}"]
    lines += [f"without {name}: pass --loader module:function for the batch as the run had it" for name in missing]
    lines += [] if found.is_recorded else [f"{NOT_RECORDED}: this is the batch that comes"]
    figures = {"out": str(out), "calls": calls, "recorded": found.is_recorded, "left_out": missing}
    show(figures, "\n".join(lines), as_json=as_json)


def _run(folder: Path, loader: str | None, cache: CacheConfig, storage_options: str | None) -> Run:
    try:
        from dataload.replay import Run
        from dataload.replay.rebuild import loader_of, loader_of_program
    except ModuleNotFoundError as error:
        raise ConfigError(f"rows and replay need {error.name}, as the run did: pip install {error.name}") from error

    # A cache that is opened with a limit evicts what exceeds it. Larger blocks have other row groups, too.
    kept = replace(cache, cache_bytes=None, block_bytes=min(cache.block, BLOCK_BYTES))
    options: dict[str, Any] = {"cache": kept, "storage_options": mapping(storage_options) or None}
    if loader is None:
        return Run(folder, lambda record, data: loader_of(record, options, data))
    return Run(folder, lambda record, data: loader_of_program(loader, record, data))


def _kept(value: Any) -> Any:
    """Return a value of a batch as torch.load has it without code of others: bytes, and dicts of `Flat` columns."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {name: _kept(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _kept(value._asdict())
    return [_kept(each) for each in value] if isinstance(value, list) else value


def _left_out(step: Step) -> list[str]:
    """Return what the ledger only names: the functions that changed the values."""
    from dataload.replay.recorded import calls_of

    given = step.start.record.get("loader") or {}
    maps = [f"map {how}" for name, how in calls_of(step.start.record["recipe"]) if name == "map"]
    return [*dict.fromkeys(maps), *(f"{name} {given[name]}" for name in ("transform", "collate_fn") if name in given)]


def _show_step(run: Run, step: Step, rank: int | None, *, values: bool, as_json: bool) -> None:
    ranks = range(step.start.record["ranks"])
    left_out = _left_out(step) if values else []
    if rank is not None and rank not in ranks:
        raise ConfigError(f"--rank={rank}: step {step.number} has the ranks 0 to {len(ranks) - 1}")
    chosen = ranks if rank is None else [rank]
    loader, problem = _opened(run, step, values=values)
    batches: list[dict[str, Any]] = [
        {
            "epoch": batch.epoch,
            "batch": batch.number,
            "ranks": [
                {"rank": each, "rows": _described(run, step, batch, each, loader, values=values)} for each in chosen
            ],
        }
        for batch in step.batches
    ]
    figures = {"step": step.number, "batches": batches, "earlier_attempts": len(step.earlier)}
    others = len(run.starts) - len(run.loops)
    figures |= {"recorded": step.is_recorded, "other_loops": others, "left_out": left_out, "problem": problem}
    lines = []
    for batch in batches:
        place = f"epoch {batch['epoch']}, batch {batch['batch']}"
        lines.append(f"step {step.number}: {place} (loader.rows_at({batch['epoch']}, {batch['batch']}))")
        for each in batch["ranks"]:
            skipped = step.start.skipped.get(each["rank"], ())
            lines += [_line(each["rank"], found, replaced=found["row_id"] in skipped) for found in each["rows"]]
    if step.earlier:
        lines.append(
            f"{counted(len(step.earlier), 'earlier attempt')} may have had a step {step.number}, before a restart"
        )
    if not step.is_recorded:
        lines.append(f"{NOT_RECORDED}: this is how it goes on")
    lines += [problem] if problem else []
    if others:
        lines.append(f"{counted(others, 'loop')} of other loaders in this folder, such as evaluations, count no steps")
    if left_out:
        lines.append(
            f"values are without {', '.join(left_out)}: dataload replay --loader module:function has the batch"
        )
    show(figures, "\n".join(lines), as_json=as_json)


def _opened(run: Run, step: Step, *, values: bool) -> tuple[Loader | None, str]:
    """Return the loader of a step if its rows cannot be told without it, and why it is missing."""
    if not (values or step.is_packed):
        return None, ""
    try:
        return run.loader(step.start), ""
    except DataloadError as error:
        if values:
            raise
        return None, f"the documents of the sequences are not known: {error}"


def _described(
    run: Run, step: Step, batch: Batch, rank: int, loader: Loader | None, *, values: bool
) -> list[dict[str, Any]]:
    """Return the rows of a rank's batch: where they are, and what they hold. loader: reads them; None: nothing does."""
    numbers = batch.rows[rank]
    found: list[dict[str, Any]] = [
        {"row_id": number, "url": _public(place.url), "row_group": place.row_group, "row": place.row}
        | ({"source": place.source} if place.source else {})
        for number, place in zip(numbers.tolist(), run.places(step.start, numbers), strict=True)
    ]
    if loader is None:
        return found
    from dataload.packed import SequenceLocation
    from dataload.replay.values import values_of
    from dataload.rows.numbered_rows import PlacedRows

    stream, draw = loader.rank_sampler.steps.of_rank(rank).seeds(batch.epoch)
    for one, place in zip(found, loader.dataset.locate(numbers), strict=True):
        if isinstance(place, SequenceLocation):
            pieces = place.documents(None if draw is None else draw[1], loader.rank_sampler.seed)
            one["documents"] = [
                {**of._asdict(), "url": _public(of.url), "start": start, "stop": stop} for of, start, stop in pieces
            ]
    if values:
        rows = PlacedRows(numbers.tolist(), (stream, batch.cursor), draw)
        for one, row in zip(found, values_of(loader.dataset, rows), strict=True):
            one["values"] = {name: plain_value(value) for name, value in row.items()}
    return found


def _line(rank: int, found: dict[str, Any], *, replaced: bool) -> str:
    source = f" of {found['source']}" if "source" in found else ""
    place = f"{found['url']} row group {found['row_group']} row {found['row']}"
    lines = [f"rank {rank}  row {found['row_id']}{source}: {place}{' (replaced: on_error=skip)' * replaced}"]
    if "documents" in found:
        lines[0] = f"rank {rank}  sequence {found['row_id']}{source}:"
        for each in found["documents"]:
            place = f"{each['url']} row group {each['row_group']} row {each['row']}"
            lines.append(f"    values {each['start']} to {each['stop']} of {place}")
    if "values" in found:
        lines.append(f"    {row_text(found['values'])}")
    return "\n".join(lines)


def _public(url: str) -> str:
    from dataload.runtime.redact import without_credentials

    return without_credentials(url)


def _show_times(run: Run, row: int, epochs: int, *, as_json: bool) -> None:
    times = list(run.steps_of(row, epochs))
    lines = [f"step {each.step}: epoch {each.epoch}, rank {each.rank}" for each in times]
    show({"row": row, "seen": [each._asdict() for each in times]}, "\n".join(lines) or "never", as_json=as_json)


def _show_verified(run: Run, *, as_json: bool) -> None:
    found = run.verify()
    last = next((text for start in reversed(run.starts) for _, text in reversed(start.seals)), None)
    figures = {"loops": len(run.starts), **found._asdict(), "last": last}
    text = f"{counted(found.rows, 'row')} of rank 0 under {counted(found.seals, 'seal')}: as sealed"
    lines = [*found.differences, *(f"{each}: not checked" for each in found.unknown)] or [text]
    show(figures, "\n".join([*lines, f"the last seal is {last}"]), as_json=as_json)
    if found.differences or found.unknown:
        raise typer.Exit(FOUND_A_PROBLEM)
