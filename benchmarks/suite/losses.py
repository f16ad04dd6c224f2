"""Sentences on every figure in which another system is better than dataload."""

from __future__ import annotations

from collections.abc import Callable

from rich.filesize import decimal

from dataload.benchmarks.suite.figures import Figures, Spread
from dataload.benchmarks.suite.measurement import EPOCHS
from dataload.benchmarks.systems.registry import Entry

OURS = "dataload"

Of = Callable[[str, str], Spread | None]


def feed_losses(figures: Figures) -> list[str]:
    """Return a list of the datasets and phases in which another system keeps more accelerators busy."""
    return _told(
        _fewer(figures, "cold") + _fewer(figures, "warm"),
        "No system keeps more accelerators busy than dataload.",
        "Systems that keep more accelerators busy than dataload:",
    )


def epoch_losses(figures: Figures, most: int) -> list[str]:
    """Return a list of the datasets for which another system is faster, or takes fewer bytes or less memory."""
    return _told(
        _less(figures, most),
        "No system takes less of any of these than dataload.",
        "Systems that take less than dataload:",
    )


def _less(figures: Figures, most: int) -> list[str]:

    def seconds(dataset: str, system: str) -> Spread | None:
        return figures.cost(dataset, system, 1, EPOCHS, "seconds")

    def sent(dataset: str, system: str) -> Spread | None:
        spread = figures.cost(dataset, system, most, EPOCHS, "origin_bytes")
        return spread and Spread(round(spread.median, 1), spread.low, spread.high)

    def memory(dataset: str, system: str) -> Spread | None:
        return figures.memory(dataset, system, most)

    return [
        *_losses(figures, seconds, "seconds", "{:.1f} s".format, -1),
        *_losses(figures, sent, f"from S3, {most} ranks", "{:.1f} ×".format, -1),
        *_losses(figures, memory, f"memory, {most} ranks", lambda value: decimal(int(value)), -1),
    ]


def losses_in_short(figures: Figures, most: int) -> list[str]:
    """Return a line on where another system is better; none: no line."""
    sentences = []
    if less := [line.removeprefix("- ").partition("; dataload")[0] for line in _less(figures, most) if line]:
        sentences.append(f"Less than dataload takes: {'; '.join(less)}.")
    parts = []
    for name, lines in (("first", _fewer(figures, "cold")), ("later", _fewer(figures, "warm"))):
        if lost := [line.removeprefix("- ").partition(",")[0] for line in lines if line]:
            parts.append(f"in {name} epochs of {', '.join(lost)}")
    if parts:
        sentences.append(f"Another system keeps more accelerators busy {'; '.join(parts)}.")
    return [" ".join(sentences)] if sentences else []


def _fewer(figures: Figures, phase: str) -> list[str]:
    return _losses(figures, lambda dataset, system: figures.fed(dataset, system, phase), phase, "{:,.0f}".format, 1)


def _losses(figures: Figures, of: Of, title: str, shape: Callable[[float], str], sign: int) -> list[str]:
    """Return a line for each dataset with figures: the systems that are better, or "" if none is.

    Args:
        figures: The figures.
        of: Returns the figure of a dataset and a system.
        title: Name of the figure.
        shape: Formats it.
        sign: 1 if more is better, -1 if less is.
    """
    lines = []
    for dataset in figures.datasets:
        mine = of(dataset, OURS)
        others = [(entry, of(dataset, entry.name)) for entry in figures.systems if entry.kind != "ours"]
        if mine is None or not any(its for _, its in others):
            continue
        better = [(entry, its) for entry, its in others if its and sign * (its.median - mine.median) > 0]
        said = ", ".join(f"{_named(entry)} {shape(its.median)}" for entry, its in better)
        lines.append(f"- {dataset}, {title}: {said}; dataload {shape(mine.median)}" if better else "")
    return lines


def _told(lines: list[str], none: str, some: str) -> list[str]:
    """Return the lines under a title, the sentence that there are none, or nothing if nothing was compared."""
    told = [line for line in lines if line]
    return [some, "", *told] if told else [none] if lines else []


def _named(entry: Entry) -> str:
    return f"{entry.name} (reference)" if entry.kind == "reference" else entry.name
