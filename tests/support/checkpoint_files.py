"""The files of checkpoints, as an attacker or a failing disk changes them."""

from __future__ import annotations

import json

from dataload.train.checkpoint import manifest
from dataload.train.checkpoint.checkpoints import STATE
from dataload.train.checkpoint.state import from_json, to_json


def saved_state(checkpoint):
    """Return the state in a checkpoint. Its tensors have no values, except those of generators and loaders."""
    return from_json(json.loads((checkpoint / STATE).read_text())["state"])


def change_state(checkpoint, state):
    """Replace the state in a checkpoint."""
    content = json.loads((checkpoint / STATE).read_text())
    (checkpoint / STATE).write_text(json.dumps({**content, "state": to_json(state)}))
    seal(checkpoint)


def seal(checkpoint):
    """Write a manifest that fits the files of a checkpoint, as whoever can write there can."""
    names = [path.name for path in checkpoint.iterdir() if path.name != manifest.MANIFEST]
    (checkpoint / manifest.MANIFEST).write_bytes(manifest.content_of(manifest.entries(checkpoint, names)))
