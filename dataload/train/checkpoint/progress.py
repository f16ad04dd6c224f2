"""How far a run has come, as a checkpoint has it."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from dataload.train.checkpoint.state import check_rng_state

PROCESS = {"generators": dict, "so far": dict, "loader": object, "usual weight": Real}
GENERATORS = {"torch": Tensor, "cuda": Tensor | None, "python": tuple, "numpy": dict, "more": list}
SO_FAR = ("sums", "rows", "counts")


class Progress(NamedTuple):
    """How far a run has come.

    Attributes:
        history: The metrics of each finished epoch.
        step: Optimizer steps so far.
        processes: For each process its data-parallel rank, and a dict: "generators" has the state of `rng_state`,
            "so far" the `EpochMetrics.state` of the unfinished epoch ({} between epochs), "loader" the loader's state,
            "usual weight" that of `OptimizerStep`.
        inventories: Which rows the data of the unfinished epoch had, see `Loader.inventories`.
    """

    history: list[dict[str, Any]]
    step: int
    processes: list[tuple[int, dict[str, Any]]]
    inventories: dict[str, str]

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Progress:
        """Return the progress in a checkpoint, whose content may be anything.

        Raises:
            ValueError: It is no progress. The message names the part.
            TypeError, RuntimeError: A generator cannot have its state.
        """
        _check(content, {"history": list, "step": int, "processes": list, "inventories": dict}, "the checkpoint")
        progress = cls(*(content[name] for name in cls._fields))
        _check(progress.inventories, dict.fromkeys(progress.inventories, str), "inventories")
        for number, record in enumerate(progress.history):
            _check(record, {"epoch": int}, f"history[{number}]")
            if record["epoch"] != number:
                raise ValueError(f"history[{number}] is of epoch {record['epoch']}")
        if progress.step < 0:
            raise ValueError(f"step is {progress.step}")
        for number, process in enumerate(progress.processes):
            name = f"processes[{number}]"
            if not (isinstance(process, tuple) and len(process) == 2 and type(process[0]) is int):
                raise ValueError(f"{name} is no pair of a rank and its state")
            _check(process[1], PROCESS, name)
            _check(process[1]["generators"], GENERATORS, f"{name}: generators")
            check_rng_state(process[1]["generators"])
            if metrics := process[1]["so far"]:
                _check(metrics, dict.fromkeys(SO_FAR, dict), f"{name}: so far")
                if more := sorted(map(repr, metrics.keys() - set(SO_FAR))):
                    raise ValueError(f"{name}: so far has more: {', '.join(more)}")
                for kind, figures in metrics.items():
                    _check(figures, dict.fromkeys(figures, Real), f"{name}: {kind} so far")
        ranks = sorted({rank for rank, _ in progress.processes})
        if not ranks or ranks != list(range(len(ranks))):
            raise ValueError(f"processes are of ranks {ranks}")
        return progress


def _check(content: Any, types: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless `content` is a dict that has values of these types."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {type(content).__name__}, not a dict")  # noqa: TRY004 (a damaged file is no wrong type)
    for name, kind in types.items():
        if name not in content:
            raise ValueError(f"{where} lacks {name!r}")
        if not isinstance(content[name], kind) or (kind is int and isinstance(content[name], bool)):
            raise ValueError(f"{where} has a {type(content[name]).__name__} as {name!r}")
