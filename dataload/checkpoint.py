"""One checkpoint file: everything that a training run needs to go on, replaced as a whole or not at all."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dataload.distributed import agree, gather
from dataload.errors import ConfigError
from dataload.world import World

CHECKPOINT = "checkpoint.pt"


def load(parts: dict[str, Any], folder: Any, resume: Any, world: World) -> list[dict[str, Any]]:
    """Restores `parts` and this rank's generators; returns the history so far. Nothing but plain data is unpickled."""
    place = folder if resume == "auto" else resume
    path = Path(place) if place is not None and Path(place).is_file() else Path(place or "", CHECKPOINT)
    found = place is not None and path.is_file()
    if resume not in (None, "auto") and not found:
        raise ConfigError(f"resume={str(resume)!r}: no checkpoint there")
    saved = torch.load(path, map_location="cpu", weights_only=True) if found else {"history": []}
    agree("epochs done by the checkpoint (a checkpoint_dir that not all ranks see?)", len(saved["history"]))
    if found:
        if odd := saved["parts"].keys() ^ parts.keys():
            raise ConfigError(f"{path} and this call of fit do not both have: {', '.join(sorted(odd))}")
        for name, part in parts.items():
            part.load_state_dict(saved["parts"][name])
        if len(saved["generators"]) == world.world_size:
            _set_generators(saved["generators"][world.rank])
    return list(saved["history"])


def save(parts: dict[str, Any], history: list[dict[str, Any]], path: Path, world: World) -> None:
    """Rank 0 replaces the file as a whole: a kill at any moment leaves the old one or the new one. The others wait."""
    generators = gather(_generators())
    if world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        states = {name: _plain(part.state_dict()) for name, part in parts.items()}
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save({"parts": states, "history": history, "generators": generators}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    if dist.is_initialized():
        dist.barrier()


def _plain(state: Any) -> Any:
    """`state` with numpy's scalars as Python's (a scheduler's, say), which `torch.load(weights_only=True)` takes."""
    if type(state) in (list, tuple):
        return type(state)(map(_plain, state))
    if type(state) is dict:
        return {key: _plain(value) for key, value in state.items()}
    return state.item() if isinstance(state, np.generic) else state


def _generators() -> dict[str, Any]:
    """The state of the generators that the user's code may draw from, numpy's global one included, as plain data."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": numpy}


def _set_generators(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])  # noqa: NPY002
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
