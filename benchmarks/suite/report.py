"""Tables in Markdown of the results, and the part for docs/comparison.md. The input is the JSON of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from dataload.benchmarks.origin.behaviour import Behaviour
from dataload.benchmarks.suite.figures import STOPPED, Figures, Spread, ranked
from dataload.benchmarks.suite.host import NO_ANSWER
from dataload.benchmarks.suite.losses import epoch_losses, feed_losses, losses_in_short
from dataload.benchmarks.suite.measurement import EPOCHS
from dataload.benchmarks.systems.registry import Entry

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
SHOWN_EPOCHS = (1, 3, EPOCHS)
SECONDS = "**Seconds for ten epochs on one rank, with start-up: less is better.**"
CONVERTED = "“+ 2 s” is the conversion to a format of the system's own, made once."
LAST_COLUMNS = "The last two columns are of {}: bytes from S3, as multiples of the Parquet files, and memory."
ABOUT = "≈: estimated from two epochs or more."
STOPPED_EARLY = "“No answer” or “one epoch”: the benchmark stopped the system in its first or second epoch."
EXTRAPOLATED = "“n measured”: the first n epochs ran. Each other one counts as the median of those after the first."
RATES = "One rank, without accelerators. Cold: the first epoch with its start-up, of which the first batch is a part."
ONE_EPOCH = "one epoch:"
MOST_ERROR = 90  # characters of an error in a cell
NOTES = {
    "pixels": (
        "pixels: in cold epochs MosaicML, LitData and WebDataset fetch stored pixels, 196 KB a row. Systems that keep",
        "no rows decode JPEGs in every epoch.",
    )
}

Result = dict[str, Any]


def markdown(results: Result) -> str:
    """Return all tables."""
    figures = Figures(results)
    machine = results["machine"]
    hardware = f"{machine['processor']}, {machine['cores']} cores, {machine['memory']} of memory, {machine['system']}"
    lines = [
        "# Benchmarks",
        "",
        f"{_date(results)}, on {hardware}.",
        f"Size {results['size']}, {results['rounds']} round(s); {_origin(results)}.",
        *_control(results.get("written_bytes_per_second")),
        "",
        "Origin, loader and training step share the processors. Cells of several rounds are medians (lowest–highest).",
        "Every row of every epoch is read and checked.",
        *(line for each in figures.datasets.values() for line in NOTES.get(each["workload"], ())),
        *_feeds(results, figures),
        *_all_epochs(results, figures),
        *_rates(results, figures),
        *_settings(figures),
    ]
    if problems := figures.problems():
        lines += ["", "## Rows that differ from the dataset", "", *(f"- {problem}" for problem in problems)]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return "\n".join([*lines, "", "## Versions", "", versions, ""])


def headline(results: Result) -> str:
    """Return the part of docs/comparison.md: one table, and where another system is better."""
    figures = Figures(results)
    datasets, most = list(figures.datasets), max(results["ranks"])
    rows = [_ten_epochs(figures, entry, most) for entry in figures.systems]
    cells = " ".join(cell for row in rows for cell in row)
    notes = [ABOUT] * ("≈" in cells) + [STOPPED_EARLY] * (NO_ANSWER in cells or ONE_EPOCH in cells)
    lines = [
        " ".join([SECONDS, *[CONVERTED] * (" + " in cells), LAST_COLUMNS.format(ranked(most))]),
        " ".join([*notes, f"{_measured(results)} on {_date(results)}, with {_origin(results)}."]),
        "",
        *_table(["", *datasets, f"from S3, {ranked(most)}", f"memory, {ranked(most)}"], rows),
        "",
        *losses_in_short(figures, most),
    ]
    return "\n".join(lines).strip()


def put_between_marks(page: Path, text: str) -> None:
    """Replace the text between the benchmark marks of a page. Raise ValueError if there are no marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{page} has no benchmark marks: add {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _feeds(results: Result, figures: Figures) -> list[str]:
    datasets = list(figures.datasets)
    lines = [
        "",
        "## Accelerators kept busy",
        "",
        f"{_date(results)}.",
        "The largest number of emulated accelerators with a utilization (AU) of 90 % or more, fed by a process. AU is",
        "the ideal compute time over the total time without the first step, as in MLPerf Storage v2.0",
        "(mlcommons/storage, Submission_guidelines.md, 4.1). So a loader that fetches much before its first batch does",
        "not lose AU by it; the seconds until then stand in brackets. Cold: the first epoch; warm: later ones. The",
        "accelerators sleep on a clock of deadlines; the next batch, or 1 ms of work, is queued. <: the search ended",
        "before it found a number that is kept busy. ≥: it ended before it found one that is not. “Stopped”: the",
        "benchmark stopped the system before this was measured, as its epochs took all the time.",
        "",
    ]
    heads = ["", *(f"{dataset}, {phase}" for dataset in datasets for phase in ("cold", "warm"))]
    rows = [
        [_name(entry), *(_fed(figures, dataset, entry, phase) for dataset in datasets for phase in ("cold", "warm"))]
        for entry in figures.systems
    ]
    if rate := results["behaviour"]["host_bytes_per_second"]:
        wire = (cell for dataset in datasets for cell in (_count(figures.wire(dataset, rate)), ""))
        rows.append([f"*{8 * rate / 1e9:g} Gbit/s allow*", *wire])
    units = [
        f"- {dataset}: an emulated accelerator is {each['accelerator']['unit']}, "
        f"{each['accelerator']['rows_per_second']:,.0f} rows/s ({each['accelerator']['source']})."
        for dataset, each in figures.datasets.items()
    ]
    return [*lines, *_table(heads, rows), "", *units, "", *feed_losses(figures)]


def _all_epochs(results: Result, figures: Figures) -> list[str]:
    lines = [
        "",
        "## Ten epochs",
        "",
        f"{_date(results)}.",
        "Seconds include start-up (importing and making the loader, after torch), but not the conversion to a format",
        "of its own, from and to the local disk. From S3: multiples of the Parquet files, conversions not counted.",
        "Memory is the peak of all processes, anonymous and shared, without the page cache.",
        *_conversions(figures),
        *_extrapolated(figures, tuple(results["ranks"])),
    ]
    for dataset, each in figures.datasets.items():
        size = f"{each['rows']:,} rows, {decimal(each['parquet_bytes'])} as Parquet in row groups of "
        lines += [
            "",
            f"### {dataset}",
            "",
            f"{size}{each['row_group_megabytes']:g} MB, batches of {each['batch_size']}.",
        ]
        missing = [ranks for ranks in sorted(results["ranks"]) if _is_missing(figures, dataset, ranks)]
        heads = ["", "ranks", "conversion", *(_epochs(count) for count in SHOWN_EPOCHS), "from S3", "memory"]
        rows = [
            [_name(entry), str(ranks), *_epochs_of(figures, dataset, entry, ranks)]
            for ranks in sorted(results["ranks"])
            for entry in figures.systems
            if figures.runs(dataset, entry.name, ranks) and ranks not in missing
        ]
        lines += ["", *_table(heads, rows), *(line for ranks in missing for line in ("", f"{ranked(ranks)}: not run."))]
    return [*lines, "", *epoch_losses(figures, max(results["ranks"]))]


def _conversions(figures: Figures) -> list[str]:
    """Return the line on the dates of the conversions, if there were any."""
    prices = [price for each in figures.datasets.values() for price in each["conversions"].values()]
    dates = sorted({price.get("date", "an unknown date, maybe by an earlier run") for price in prices})
    return [f"Conversions were measured on {', '.join(dates)}."] if dates else []


def _is_missing(figures: Figures, dataset: str, ranks: int) -> bool:
    """Return whether no system was measured, because the time was over."""
    ran = [entry.name for entry in figures.systems if figures.runs(dataset, entry.name, ranks)]
    errors = [figures.error(dataset, name, ranks) for name in ran]
    return bool(errors) and all(error.startswith("not run") for error in errors)


def _epochs_of(figures: Figures, dataset: str, entry: Entry, ranks: int) -> list[str]:
    if error := figures.error(dataset, entry.name, ranks):
        return [_converted(figures, dataset, entry), _short(error), *[""] * (len(SHOWN_EPOCHS) + 1)]
    costs = [figures.cost(dataset, entry.name, ranks, count, "seconds") for count in SHOWN_EPOCHS]
    cells = [_seconds(cost) if cost else STOPPED for cost in costs]
    sent = figures.cost(dataset, entry.name, ranks, EPOCHS, "origin_bytes")
    memory = figures.memory(dataset, entry.name, ranks)
    return [_converted(figures, dataset, entry), *cells, _spread(sent, _times), _spread(memory, _bytes)]


def _ten_epochs(figures: Figures, entry: Entry, most: int) -> list[str]:
    seconds = [_with_conversion(figures, dataset, entry) for dataset in figures.datasets]
    sent = {name: figures.cost(name, entry.name, most, EPOCHS, "origin_bytes") for name in figures.datasets}
    memory = {name: figures.memory(name, entry.name, most) for name in figures.datasets}
    return [_name(entry), *seconds, _range(sent, _times), _range(memory, _bytes)]


def _with_conversion(figures: Figures, dataset: str, entry: Entry) -> str:
    """Return the seconds of ten epochs, or of the first if the system was stopped, and those of its conversion."""
    if error := figures.error(dataset, entry.name, 1):
        return _short(error)
    one, ten = (figures.cost(dataset, entry.name, 1, count, "seconds") for count in (1, EPOCHS))
    cell = f"{ONE_EPOCH} {_seconds(one)}" if one and not ten else _about(ten)
    return " + ".join(filter(None, [cell, _converted(figures, dataset, entry)]))


def _converted(figures: Figures, dataset: str, entry: Entry) -> str:
    seconds = figures.conversion_seconds(dataset, entry.name)
    return _duration(seconds) if seconds else ""


def _rates(results: Result, figures: Figures) -> list[str]:
    lines = ["", "## Rates and processor time", "", f"{_date(results)}. {RATES}", ""]
    heads = ["", "", "first batch", "cold, rows/s", "warm, rows/s", "cold, CPU-s/GB", "warm, CPU-s/GB"]
    rows = []
    for dataset in figures.datasets:
        for entry in figures.entries:
            cells = [_spread(figures.first_batch(dataset, entry.name), "{:.2f} s".format)]
            cells += [
                _spread(figure(dataset, entry.name, phase), shape) if phase in entry.phases else ""
                for figure, shape in ((figures.rate, _count), (figures.cpu, "{:.2f}".format))
                for phase in ("cold", "warm")
            ]
            rows.append([dataset, _name(entry), *cells])
    return [*lines, *_table(heads, rows)]


def _settings(figures: Figures) -> list[str]:
    rows = [[entry.name, entry.shuffle, str(entry.workers), entry.settings] for entry in figures.entries]
    return ["", "## Settings", "", *_table(["", "shuffled", "workers", "settings"], rows)]


def _extrapolated(figures: Figures, ranks: tuple[int, ...]) -> list[str]:
    """Return the line on extrapolated cells, if there are any."""
    costs = (
        figures.cost(dataset, entry.name, count, EPOCHS, "seconds")
        for dataset in figures.datasets
        for entry in figures.systems
        for count in ranks
    )
    if not any(each is not None and each.measured for each in costs):
        return []
    return [EXTRAPOLATED, ""]


def _fed(figures: Figures, dataset: str, entry: Entry, phase: str) -> str:
    spread = figures.fed(dataset, entry.name, phase)
    if spread is None:
        return _short(figures.feed_error(dataset, entry.name, phase)) or "–"
    cell = _spread(spread, _count)
    waited = figures.first_batch(dataset, entry.name) if phase == "cold" else None
    return f"{cell} ({waited.median:.1f} s)" if waited else cell


def _measured(results: Result) -> str:
    return "Measured once," if results["rounds"] == 1 else f"Medians of {results['rounds']} rounds,"


def _date(results: Result) -> str:
    return f"{results['date']}, commit {results['commit']}"


def _origin(results: Result) -> str:
    """Return the behaviour of the origin in words."""
    behaviour = Behaviour(**{each.name: results["behaviour"][each.name] for each in fields(Behaviour)})
    if behaviour.host_bytes_per_second is None or behaviour.bytes_per_second is None:
        return "an origin as fast as this machine"
    return (
        f"an S3 of {1e3 * behaviour.latency:g} ms, {behaviour.bytes_per_second / 1e6:g} MB/s a connection, "
        f"{behaviour.host_bytes_per_second * 8 / 1e9:g} Gbit/s a host, "
        f"{100 * behaviour.delayed:g} % of requests delayed by {behaviour.delay:g} s"
    )


def _control(written: list[float] | None) -> list[str]:
    """Return the line on the control before each stage, which shows whether the machine owns its free memory."""
    if not written:
        return []
    least = decimal(int(min(written)))
    return [f"Before each stage, after ten idle seconds, a file was written at {least}/s or more."]


def _name(entry: Entry) -> str:
    shown = f"**{entry.name}**" if entry.kind == "ours" else entry.name
    return f"{shown} (reference)" if entry.kind == "reference" else shown


def _about(spread: Spread | None) -> str:
    measured, _, extrapolated = _seconds(spread).partition(",")
    return f"≈ {measured}" if extrapolated else measured


def _seconds(spread: Spread | None) -> str:
    cell = _spread(spread, _duration)
    return f"{cell}, {spread.measured} measured" if spread and spread.measured else cell


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 20 else f"{seconds:.1f} s"


def _spread(spread: Spread | None, shape: Callable[[float], str]) -> str:
    if spread is None:
        return "–"
    middle, low, high = spread.shown(shape), shape(spread.low), shape(spread.high)
    return middle if low == high else f"{middle} ({low}–{high})"


def _range(spreads: dict[str, Spread | None], shape: Callable[[float], str]) -> str:
    """Return the range of the medians over the datasets. Name them if they are not all."""
    medians = {dataset: spread.median for dataset, spread in spreads.items() if spread is not None}
    if not medians:
        return "–"
    low, high = shape(min(medians.values())), shape(max(medians.values()))
    some = f" ({', '.join(medians)})" if len(medians) < len(spreads) else ""
    return (low if low == high else f"{low}–{high}") + some


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _times(value: float) -> str:
    return f"{value:.1f} ×"


def _bytes(value: float) -> str:
    return decimal(int(value))


def _epochs(count: int) -> str:
    return f"{count} epochs" if count > 1 else "1 epoch"


def _short(error: str) -> str:
    return error if len(error) <= MOST_ERROR else f"{error[: MOST_ERROR - 1]}…"


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(heads), _row(["---", *["--:"] * (len(heads) - 1)]), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
