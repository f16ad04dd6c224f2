"""Make torchvision and torchaudio work beside a CPU build of torch, but for their compiled operators.

Their wheels need CUDA's libraries, without which torchaudio raises when it is imported, and torchvision misses the
operators that it describes to the compiler. Both do most of their work in Python. With a CUDA build of torch, this
program does nothing.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

DEFINED = """import torch

for name in ("nms", "qnms"):  # as torchvision's library would
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

if torch.version.cuda is None:
    packages = Path(sysconfig.get_path("purelib"))
    for library in packages.glob("torchaudio/lib/*.so"):
        library.unlink()
    module = packages / "torchvision" / "_meta_registrations.py"
    if not module.read_text().startswith(DEFINED):
        module.write_text(DEFINED + module.read_text())
