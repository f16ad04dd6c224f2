"""Tables in Markdown of the results. The input is the JSON of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from dataload.benchmarks.accelerators import LOAD
from dataload.benchmarks.origin.behaviour import Behaviour
from dataload.benchmarks.suite.figures import Figures, Share, ranked, utilization
from dataload.benchmarks.suite.measurement import EPOCHS, LIMIT
from dataload.benchmarks.systems.registry import Entry

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
SHOWN_EPOCHS = (1, 3, EPOCHS)
NOTHING = "–"
MEASURE = f"""
**Of the time that you pay for, how much do the GPUs compute?** The busy share of a job is its ideal compute time over
its time from the start of the processes to the last step. Imports, the first batch, every wait and, for formats of a
system's own, the conversion count. The accelerators are emulated: they sleep on a clock of deadlines and consume
{100 * LOAD:g} % of the rows that the wire could deliver, the same for every system. More is better.
""".strip()
KINDS = f"""
*Italic*: the limit of {LIMIT} times the ideal time stopped the job after two epochs or more, and the others count as
the median of those after the first. <: it was stopped earlier, and the figure is the most that the job can reach.
""".strip()
AU = """
AU is that of MLPerf Storage v2.0: compute time over total time of the same jobs, both without the first step, so
start-up and conversion do not count. v3 admits 3D U-Net and RetinaNet only
([#439](https://github.com/mlcommons/storage/pull/439)), and empties the page cache before each epoch
([#464](https://github.com/mlcommons/storage/issues/464)); here nothing is emptied. “After imports” is the busy share
without the time until torch was imported.
""".strip()

Result = dict[str, Any]


def markdown(results: Result) -> str:
    """Return all tables."""
    figures, versions = Figures(results), results["conditions"]["versions"]
    lines = [
        "# Benchmarks",
        "",
        conditions(results),
        "",
        MEASURE,
        "",
        *_all_shares(figures),
        *_details(figures),
        *_settings(figures),
    ]
    if told := figures.told():
        lines += ["", "## Failures, and rows that differ from the dataset", "", *(f"- {each}" for each in told)]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([*lines, "", "## Versions", "", listed, ""])


def headline(results: Result) -> str:
    """Return the part of docs/comparison.md: the measure, the shares of ten epochs, and the conditions."""
    return "\n".join([MEASURE, "", *_all_shares(Figures(results)), "", conditions(results)]).strip()


def put_between_marks(page: Path, text: str) -> None:
    """Replace the text between the benchmark marks of a page. Raise ValueError if there are no marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{page} has no benchmark marks: add {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def conditions(results: Result) -> str:
    """Return when, where and with what origin the figures were measured."""
    fixed, speeds = results["conditions"], results["speed"]
    behaviour = Behaviour(**{each.name: fixed["origin"][each.name] for each in fields(Behaviour)})
    assert behaviour.bytes_per_second is not None
    assert behaviour.host_bytes_per_second is not None
    machine = fixed["machine"]
    counts = Counter((run["dataset"], run["system"], run["ranks"]) for run in results["runs"])
    rounds = max(counts.values(), default=0)
    fewer = sum(count < rounds for count in counts.values())
    machine = ", ".join(
        [machine["processor"], f"{machine['cores']} cores", f"{machine['memory']} of memory", machine["system"]]
    )
    origin = (
        f"Simulated S3 on the same cores, latency {1e3 * behaviour.latency:g} ms, at "
        f"{behaviour.bytes_per_second / 1e6:g} MB/s a connection and {8 * behaviour.host_bytes_per_second / 1e9:g} "
        f"Gbit/s a host; {100 * behaviour.delayed:g} % of requests take {behaviour.delay:g} s longer."
    )
    parts = [
        f"{results['date']}, commit {fixed['commit']}, size {fixed['size']}, on {machine}.",
        origin,
    ]
    if rounds > 1:
        spread = 100 * Figures(results).spread()
        some = f" ({fewer} of the {len(counts)} figures are of fewer)" if fewer else ""
        parts.append(f"Medians of {rounds} rounds{some}, which differ by at most {spread:.0f} points.")
    if speeds:
        parts.append(
            "The host, over the run: "
            f"ten million loops of Python in {_over(speeds, 'loop_seconds', '{:.2f}'.format)} s, "
            f"a memory copy at {_over(speeds, 'copied_bytes_per_second', _gigabytes)} GB/s, "
            f"a file written at {_over(speeds, 'written_bytes_per_second', _gigabytes)} GB/s."
        )
    return "\n".join(parts)


def percent(share: Share | None) -> str:
    """Return a share as a cell of a table."""
    if share is None:
        return NOTHING
    value = 100 * share.value
    shown = f"{value:.0f} %" if round(value, 1) >= 10 else f"{value:.1f} %"
    return {"measured": shown, "extrapolated": f"*{shown}*", "below": f"< {shown}"}[share.kind]


def _all_shares(figures: Figures) -> list[str]:
    lines: list[str] = []
    for ranks, group in figures.slices:
        lines += [f"Busy share of {EPOCHS} epochs, {ranked(ranks)}, row groups of {group:g} MB:", ""]
        heads, *rows = _shares(figures, ranks, group)
        lines += [*_table(heads, rows), ""]
    cells = " ".join(lines)
    return [*lines, KINDS] if "*" in cells.replace("**", "") or "<" in cells else lines[:-1]


def _shares(figures: Figures, ranks: int, group: float) -> list[list[str]]:
    """Return the shares for one number of ranks and one size of row groups, a row a system, below the workloads."""
    datasets = {
        described["workload"]: name
        for name, described in figures.datasets.items()
        if described["row_group_megabytes"] == group
    }
    rows = [
        [_name(entry), *cells]
        for entry in figures.entries
        for cells in [[percent(figures.share(name, entry.name, ranks)) for name in datasets.values()]]
        if {*cells} != {NOTHING}
    ]
    return [["", *datasets], *(_highlighted(row) if "**" in row[0] else row for row in rows)]


def _details(figures: Figures) -> list[str]:
    lines = ["", "## Each dataset", "", AU]
    heads = ["", "ranks", *(f"{count} epoch{'s' * (count > 1)}" for count in SHOWN_EPOCHS)]
    heads += ["after imports", "AU", "first batch", "conversion", "from S3", "processor", "memory"]
    for name, each in figures.datasets.items():
        lines += [
            "",
            f"### {name}",
            "",
            f"{each['rows']:,} rows, {decimal(each['parquet_bytes'])} as Parquet, batches of {each['batch_size']}.",
            f"Compute: {each['epoch_seconds']:.1f} s an epoch, {each['rows_per_second']:,.0f} rows/s, as",
            f"{each['accelerators']:,.1f} × {each['accelerator']} ({each['source']}).",
            "",
        ]
        ranks = sorted({ranks for ranks, group in figures.slices if group == each["row_group_megabytes"]})
        rows = [
            [_name(entry), str(count), *_cells(figures, name, entry, count)]
            for count in ranks
            for entry in figures.entries
            if figures.runs(name, entry.name, count)
        ]
        lines += _table(heads, rows)
    return lines


def _cells(figures: Figures, dataset: str, entry: Entry, ranks: int) -> list[str]:
    at, parquet_bytes = (dataset, entry.name, ranks), figures.datasets[dataset]["parquet_bytes"]
    shares = [percent(figures.share(*at, epochs)) for epochs in SHOWN_EPOCHS]
    used = figures.middle(*at, utilization)
    first = figures.middle(*at, lambda run: run["epochs"][0]["first_batch_seconds"] if run["epochs"] else None)
    converted = figures.middle(*at, lambda run: run["conversion_seconds"] or None)
    sent = figures.middle(*at, lambda run: run["origin_bytes"][-1] if run["epochs"] else None)
    spent = figures.middle(*at, lambda run: run["epochs"][-1]["cpu_seconds"] if run["epochs"] else None)
    memory = figures.middle(*at, lambda run: run["peak_bytes"] or None)
    return [
        *shares,
        percent(figures.share(*at, since="import")),
        percent(None if used is None else Share(used)),
        _shown(first, "{:.1f} s"),
        _shown(converted, "{:.0f} s"),
        NOTHING if sent is None else f"{sent / parquet_bytes:.1f} ×",
        _shown(spent, "{:.0f} s"),
        NOTHING if memory is None else decimal(int(memory)),
    ]


def _settings(figures: Figures) -> list[str]:
    rows = [[entry.name, entry.shuffle, str(entry.workers), entry.settings] for entry in figures.entries]
    return ["", "## Settings", "", *_table(["", "shuffled", "workers", "settings"], rows)]


def _name(entry: Entry) -> str:
    return {"ours": f"**{entry.name}**", "reference": f"{entry.name} (reference)"}.get(entry.kind, entry.name)


def _highlighted(row: list[str]) -> list[str]:
    return [row[0], *(f"**{cell.strip('*')}**" for cell in row[1:])]


def _over(speeds: list[dict[str, float]], name: str, shape: Any) -> str:
    """Return the range of a speed."""
    low, high = (shape(pick(each[name] for each in speeds)) for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"


def _shown(value: float | None, shape: str) -> str:
    return NOTHING if value is None else shape.format(value)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(heads), _row(["---", *["--:"] * (len(heads) - 1)]), *map(_row, rows)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
