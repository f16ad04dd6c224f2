"""Tables in Markdown and a plot of benchmark results. The input is the JSON of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from dataload.benchmarks.summary import FIGURES, Figure, summarise
from dataload.benchmarks.systems.registry import named

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
NOTES = {
    "pixels": (
        "pixels: in cold epochs MosaicML, LitData and WebDataset fetch stored pixels, 196 KB a row. The table of",
        "conversions shows what these cost beforehand. The others fetch JPEGs of about 80 KB and decode them. Systems",
        "that keep no rows decode them in every epoch.",
    )
}
COLOURS = {"ours": "#d95f02", "peer": "#7f9bb3", "floor": "#444444", "check": "#f4b183"}

Result = dict[str, Any]


def markdown(results: Result) -> str:
    """Return all results as Markdown. A cell has median, range, and the ratios to the best peer and the floor."""
    machine, versions = results["machine"], results["versions"]
    hardware = f"{machine['processor']}, {machine['cores']} cores, {machine['memory']} of memory, {machine['system']}"
    origin = "as slow as a network" if results["wire"] else "as fast as this machine"
    step = f", an accelerator step of {1e3 * results['step_seconds']:g} ms a batch" if results["step_seconds"] else ""
    summary = summarise(results)
    figures = [figure for figure in FIGURES if any(figure.name in entry["figures"] for entry in summary)]
    lines = [
        "# Benchmarks",
        "",
        f"{results['date']}, commit {results['commit']}, on {hardware}.",
        f"Size {results['size']}, {results['rounds']} rounds, an origin {origin}{step}.",
        *_control(results.get("written_bytes_per_second")),
        "",
        "Each cell: the median of the rounds (lowest–highest) · its ratio to the best peer with as many workers · its",
        "ratio to the floor, medians of the ratios within each round. More is better for rows/s and %, less elsewhere.",
        "Origin, loader and training step share the cores. Memory is anonymous and shared, without the page cache.",
        "The rows of every whole epoch were checked.",
        *(line for workload in results["workloads"] for line in NOTES.get(workload, ())),
    ]
    for workload, workers in dict.fromkeys((entry["workload"], entry["workers"]) for entry in summary):
        truth = results["workloads"][workload]
        parquet, decoded = decimal(truth["parquet_bytes"]), decimal(truth["decoded_bytes"])
        lines += [
            "",
            f"## {workload}, {workers} workers",
            "",
            f"{truth['rows']:,} rows, {parquet} as Parquet, {decoded} decoded.",
            "",
            _row(["system", "shuffled", *(f"{figure.title} ({figure.unit})" for figure in figures)]),
            _row(["---"] * (2 + len(figures))),
        ]
        lines += [
            _row([entry["system"], named(entry["system"]).shuffle, *_cells(entry, figures)])
            for entry in summary
            if (entry["workload"], entry["workers"]) == (workload, workers)
        ]
    lines += ["", "## Conversions", "", "Each runs once before the measurements. The figures above exclude it.", ""]
    lines += [_row(["system", "workload", "seconds", "bytes"]), _row(["---"] * 4)]
    for workload, truth in results["workloads"].items():
        for system, price in truth["conversions"].items():
            cells = [price["error"], ""] if "error" in price else [f"{price['seconds']:.1f}", decimal(price["bytes"])]
            lines.append(_row([system, workload, *cells]))
    lines += ["", "## Versions", "", ", ".join(f"{name} {version}" for name, version in versions.items()), ""]
    return "\n".join(lines)


def headline(results: Result) -> str:
    """Return the table of README: dataload, the best peer and the floor, at the best worker count of each workload."""
    summary = summarise(results)
    lines = [
        _row(["workload", "epoch", "dataload, rows/s", "best peer, rows/s", "", "of the floor"]),
        _row(["---", "---", "--:", "--:", "---", "--:"]),
    ]
    for workload in results["workloads"]:
        for figure in (figure for figure in FIGURES if figure.unit == "rows/s"):
            best = {kind: _best(summary, workload, kind, figure) for kind in ("ours", "peer")}
            mine, peer = best["ours"], best["peer"]
            if mine is None:
                continue
            lines.append(
                _row(
                    [
                        workload,
                        figure.title,
                        _number(mine[1]["median"], figure),
                        _number(peer[1]["median"], figure) if peer else "–",
                        peer[0] if peer else "",
                        _ratio(mine[1]["to_floor"]),
                    ]
                )
            )
    return "\n".join(lines)


def plot(results: Result, path: Path) -> None:
    """Write a PNG of the cold and warm rates and their ranges, at the best worker count of each system."""
    from matplotlib.figure import Figure as Canvas

    summary = summarise(results)
    rates = [figure for figure in FIGURES if figure.unit == "rows/s"]
    names = list(dict.fromkeys(entry["system"] for entry in summary))[::-1]
    workload_names = list(results["workloads"])
    canvas = Canvas(figsize=(10, 1 + 0.27 * len(names) * len(workload_names)), layout="constrained")
    grid = canvas.subplots(len(workload_names), len(rates), squeeze=False)
    for axes_of_workload, workload in zip(grid, workload_names, strict=True):
        for axes, figure in zip(axes_of_workload, rates, strict=True):
            found = {
                name: spread for name in names if (spread := _spread_of(summary, workload, name, figure)) is not None
            }
            if not found:
                axes.set_axis_off()
                continue
            for row, (name, spread) in enumerate(found.items()):
                below, above = spread["median"] - spread["low"], spread["high"] - spread["median"]
                colour = COLOURS[named(name).kind]
                axes.errorbar(spread["median"], row, xerr=[[below], [above]], fmt="o", color=colour, capsize=2)
            axes.set_yticks(range(len(found)), list(found))
            axes.set_xscale("log")
            lowest, highest = (
                edge(spread[side] for spread in found.values()) for edge, side in ((min, "low"), (max, "high"))
            )
            axes.set_xlim(10 ** math.floor(math.log10(lowest)), 10 ** math.ceil(math.log10(highest)))
            axes.grid(axis="x", alpha=0.3)
            axes.set_title(f"{workload}: {figure.title}, {figure.unit}", fontsize=9)
            axes.tick_params(labelsize=7)
    canvas.savefig(path, dpi=110)


def into_readme(readme: Path, text: str) -> None:
    """Replace the text between the benchmark marks of README. Raise ValueError if there are no marks."""
    before, _, rest = readme.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{readme} has no benchmark marks: add {BEGIN} … {END}")
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _control(written: list[float] | None) -> list[str]:
    """Return the line on the control before each round, which shows whether the machine owns its free memory."""
    if not written:
        return []
    least = decimal(int(min(written)))
    return [f"Before each round, after ten idle seconds, a file was written at {least}/s or more."]


def _cells(entry: Result, figures: list[Figure]) -> list[str]:
    if not entry["figures"]:
        return ["; ".join(entry["errors"]), *[""] * (len(figures) - 1)]
    cells = [_cell(entry["figures"].get(figure.name), figure) for figure in figures]
    notes = [*entry["problems"], *entry["errors"], *(f"{phase} epoch cut short" for phase in entry["cut"])]
    cells[0] += f" ({'; '.join(notes)})" if notes else ""
    return cells


def _cell(spread: Result | None, figure: Figure) -> str:
    if spread is None:
        return "–"
    low, high = _number(spread["low"], figure), _number(spread["high"], figure)
    ratios = [_ratio(spread[name]) for name in ("to_peer", "to_floor")]
    return " · ".join([f"{_number(spread['median'], figure)} ({low}–{high})", *ratios])


def _ratio(spread: Result | None) -> str:
    if spread is None:
        return "–"
    value = spread["median"]
    return f"{value:,.0f}×" if value >= 10 else f"{value:.2g}×"


def _number(value: float, figure: Figure) -> str:
    if figure.unit == "B":
        return decimal(int(value))
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _spread_of(summary: list[Result], workload: str, system: str, figure: Figure) -> Result | None:
    """Return the figure at the worker count with the best median."""
    found: list[Result] = [
        entry["figures"][figure.name]
        for entry in summary
        if (entry["workload"], entry["system"]) == (workload, system)
        and figure.name in entry["figures"]
        and not entry["problems"]
    ]
    return max(found, key=lambda spread: spread["median"], default=None)


def _best(summary: list[Result], workload: str, kind: str, figure: Figure) -> tuple[str, Result] | None:
    """Return the system of a kind with the best median, and its spread."""
    systems = {entry["system"] for entry in summary if named(entry["system"]).kind == kind}
    found = {system: _spread_of(summary, workload, system, figure) for system in systems}
    have = {system: spread for system, spread in found.items() if spread}
    return max(have.items(), key=lambda item: item[1]["median"], default=None)
