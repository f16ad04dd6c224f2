"""Draw demo.svg and top.svg from what the commands print: python docs/pictures/terminals.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.text import Text

COLUMNS, RANKS, SECONDS = 96, 4, 8
FONT = re.compile(r"\s*@font-face \{.*?\n    \}", re.DOTALL)  # a picture fetches nothing from other servers


def draw(name: str, *arguments: str) -> None:
    """Run a command of dataload and draw what it prints."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TTY_INTERACTIVE": "0"}
    command = [sys.executable, "-m", "dataload", *arguments]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ dataload {' '.join(arguments)}\n{printed.rstrip()}"))
    svg = console.export_svg(title="dataload", unique_id=name)
    Path(__file__).with_name(f"{name}.svg").write_text(FONT.sub("", svg))


def rank(number: int, data: str, stats: str) -> None:
    """Read the data in small steps, as a rank that trains. The last one is slower."""
    from dataload import World, make_loader

    world = World(number, RANKS, number, RANKS)
    loader = make_loader(data, 256, world=world, stats_dir=stats, cache_dir=f"{data}/../cache")
    while True:
        for _ in loader:
            time.sleep(0.02 if number < RANKS - 1 else 0.05)


def main() -> None:
    draw("demo", "demo")
    with TemporaryDirectory() as folder:
        data, stats = Path(folder, "train"), Path(folder, "stats")
        data.mkdir()
        table = pa.table({"x": range(500_000), "y": range(500_000)})
        pq.write_table(table, data / "rows.parquet", row_group_size=20_000)
        spawn = get_context("spawn")
        ranks = [spawn.Process(target=rank, args=(each, str(data), str(stats)), daemon=True) for each in range(RANKS)]
        for each in ranks:
            each.start()
        while len(list(stats.glob("*.jsonl"))) < RANKS:
            time.sleep(1)
        time.sleep(SECONDS)
        os.chdir(folder)
        draw("top", "top", "stats", "--once")


if __name__ == "__main__":
    main()
