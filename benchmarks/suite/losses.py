"""Sentences on every figure in which another system is better than dataload."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rich.filesize import decimal

from dataload.benchmarks.suite.figures import Figures, Spread, ranked
from dataload.benchmarks.suite.measurement import EPOCHS
from dataload.benchmarks.systems.registry import Entry

OURS = "dataload"

Of = Callable[[str, str], Spread | None]


class Loss(NamedTuple):
    """A figure of a dataset in which other systems are or may be better: names and figures, and that of dataload."""

    dataset: str
    title: str
    others: str
    mine: str
    undecided: str = ""

    def __str__(self) -> str:
        parts = [self.others, f"dataload {self.mine}", self.undecided and f"undecided: {self.undecided}"]
        return f"- {self.dataset}, {self.title}: {'; '.join(filter(None, parts))}"


def feed_losses(figures: Figures) -> list[str]:
    """Return a list of the datasets and phases in which another system keeps more accelerators busy."""
    return _told(
        _fewer(figures, "cold") + _fewer(figures, "warm"),
        "No system keeps more accelerators busy than dataload.",
        "Systems that keep more accelerators busy than dataload, or may do so (undecided):",
    )


def epoch_losses(figures: Figures, most: int) -> list[str]:
    """Return a list of the datasets for which another system is faster, or takes fewer bytes or less memory."""
    return _told(
        _slower(figures) + _more_sent(figures, most) + _more_memory(figures, most),
        "No system takes less of any of these than dataload.",
        "Systems that take less than dataload:",
    )


def losses_in_short(figures: Figures, most: int) -> list[str]:
    """Return a line on where another system is better; none: no line."""
    sentences = [
        *_sentence("takes fewer seconds", _slower(figures)),
        *_sentence(f"reads less from S3 with {ranked(most)}", _more_sent(figures, most)),
        *_sentence(f"takes less memory with {ranked(most)}", _more_memory(figures, most)),
        *_sentence("keeps more accelerators busy in the first epoch", _fewer(figures, "cold")),
        *_sentence("keeps more accelerators busy in later epochs", _fewer(figures, "warm")),
    ]
    return [" ".join(sentences)] if sentences else []


def _sentence(does: str, losses: list[Loss | None]) -> list[str]:
    """Return the sentence on the datasets of these losses; none without losses."""
    lost = [
        f"{loss.dataset} ({loss.others or f'undecided: {loss.undecided}'}; dataload {loss.mine})"
        for loss in losses
        if loss
    ]
    return [f"Another system {does}: {', '.join(lost)}."] if lost else []


def _slower(figures: Figures) -> list[Loss | None]:
    def seconds(dataset: str, system: str) -> Spread | None:
        return figures.cost(dataset, system, 1, EPOCHS, "seconds")

    return _losses(figures, seconds, "seconds", "{:.1f} s".format, -1)


def _more_sent(figures: Figures, most: int) -> list[Loss | None]:
    def sent(dataset: str, system: str) -> Spread | None:
        spread = figures.cost(dataset, system, most, EPOCHS, "origin_bytes")
        return spread and Spread(round(spread.median, 1), spread.low, spread.high)

    return _losses(figures, sent, f"from S3, {most} ranks", "{:.1f} ×".format, -1)


def _more_memory(figures: Figures, most: int) -> list[Loss | None]:
    def memory(dataset: str, system: str) -> Spread | None:
        return figures.memory(dataset, system, most)

    return _losses(figures, memory, f"memory, {most} ranks", lambda value: decimal(int(value)), -1)


def _fewer(figures: Figures, phase: str) -> list[Loss | None]:
    return _losses(figures, lambda dataset, system: figures.fed(dataset, system, phase), phase, "{:,.0f}".format, 1)


def _losses(figures: Figures, of: Of, title: str, shape: Callable[[float], str], sign: int) -> list[Loss | None]:
    """Return the loss of each dataset with figures, or None if no system is better.

    Args:
        figures: The figures.
        of: Returns the figure of a dataset and a system.
        title: Name of the figure.
        shape: Formats it.
        sign: 1 if more is better, -1 if less is.
    """
    losses: list[Loss | None] = []
    for dataset in figures.datasets:
        mine = of(dataset, OURS)
        others = [(entry, of(dataset, entry.name)) for entry in figures.systems if entry.kind != "ours"]
        if mine is None or not any(its for _, its in others):
            continue
        better: list[str] = []
        undecided: list[str] = []
        least, most = sorted(sign * value for value in mine.possible)
        for entry, its in others:
            its_least, its_most = sorted(sign * value for value in its.possible) if its else (least, least)
            if its and its_most > least:
                (better if its_least > most else undecided).append(f"{_named(entry)} {its.shown(shape)}")
        loss = Loss(dataset, title, ", ".join(better), mine.shown(shape), ", ".join(undecided))
        losses.append(loss if better or undecided else None)
    return losses


def _told(losses: list[Loss | None], none: str, some: str) -> list[str]:
    """Return the losses under a title, the sentence that there are none, or nothing if nothing was compared."""
    told = [str(loss) for loss in losses if loss]
    return [some, "", *told] if told else [none] if losses else []


def _named(entry: Entry) -> str:
    return f"{entry.name} (reference)" if entry.kind == "reference" else entry.name
