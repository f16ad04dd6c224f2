"""`CacheConfig` is the only list of the settings of a cache: everything else that names them follows its fields."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cache_options
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import ConfigError
from dataload.cache.config import parse_bytes

ADDED = """
from __future__ import annotations

import inspect, pydoc, sys
from dataclasses import dataclass, field

from dataload.cache import config

@dataclass(frozen=True)
class CacheConfig(config.CacheConfig):
    added: int = field(default=7, metadata=config.OF_FOLDER)
    of_origin: str = "east"

ours = "    added: What it adds. More of it.\\n        of_origin: Where it is.\\n\\n    Raises:"
CacheConfig.__doc__ = config.CacheConfig.__doc__.replace("\\n    Raises:", f"    {ours}", 1)
config.CacheConfig = CacheConfig

import fsspec
import typer
import cache_options
import dataload
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cli.app import app

source, cache = sys.argv[1:]

# Python
for function in (dataload.make_dataset, dataload.make_loader, dataload.mix, TierCacheFileSystem.__init__):
    shown = inspect.signature(function).parameters["added"]
    assert (shown.default, shown.kind) == (7, shown.KEYWORD_ONLY), function
    assert "added: 'int' = 7" in pydoc.plain(pydoc.render_doc(function)), function
given = {"cache_dir": cache, "added": 3}
for dataset in (
    dataload.make_dataset(source, **given),
    dataload.make_loader(source, 2, **given).dataset,
    dataload.mix([source], **given).datasets[0],
):
    assert dataset.blocks.config.added == 3

# The filesystem
assert "added: 'int' = 7" in pydoc.plain(pydoc.render_doc(TierCacheFileSystem))
assert fsspec.filesystem("tiercache", target_protocol="file", **given).blocks.config.added == 3

# Commands
group = typer.main.get_command(app)
commands = {**group.commands, **{f"cache {name}": each for name, each in group.commands.pop("cache").commands.items()}}
del commands["cache"], commands["demo"]  # which has a cache of its own
texts = {name: each.get_help(each.make_context(name, [], resilient_parsing=True)) for name, each in commands.items()}
takes_cache = {name for name, text in texts.items() if "--cache-dir" in text}
assert takes_cache == {
    "head", "plan", "warm", "doctor", "rows", "replay", "cache stats", "cache verify", "cache evict"
}
for name in takes_cache:
    assert all(text in texts[name] for text in ("--added", "What it adds.", "[default: 7]")), texts[name]
    assert ("--of-origin" in texts[name]) == (not name.startswith("cache ")), name
    assert not {"--consistency", "--cluster-key"}.intersection(texts[name].split()), name
app(["head", source, "--cache-dir", cache, "--added", "3", "--json"], standalone_mode=False)

# Type checkers and the docs
assert "    added: int\\n" in cache_options.typed()
assert "| `added` | `7` | What it adds. More of it. |" in cache_options.table()
"""


@pytest.mark.slow
def test_a_new_setting_is_an_argument_an_option_and_a_row_of_the_docs(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "x.parquet")
    command = [sys.executable, "-c", ADDED, tmp_path / "x.parquet", tmp_path / "cache"]
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    ran = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_type_checkers_and_the_docs_know_each_setting() -> None:
    assert cache_options.OPTIONS.read_text() == cache_options.typed(), "run make options"
    assert cache_options.table() in cache_options.GUIDE.read_text(), "run make options"


def test_each_setting_is_documented() -> None:
    assert [name for name, text in cache_options.config.described().items() if not text.endswith(".")] == []


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (5, 5),
        ("5", 5),
        (1e9, 10**9),
        ("500GB", 500 * 10**9),
        ("4MiB", 4 << 20),
        ("4 MiB", 4 << 20),
        (" 1.5 TB ", 15 * 10**11),
        (".5kB", 500),
        ("0.1GiB", round((1 << 30) / 10)),
        ("2Gi", 2 << 30),
        ("3g", 3 * 10**9),
        ("7B", 7),
    ],
)
def test_sizes(size: int | str, count: int) -> None:
    assert parse_bytes("cache_bytes", size) == count


@pytest.mark.parametrize(
    "size", ["", "GB", "many", "5iB", "1e3", "5 G B", "1,5GB", "1GB2", float("nan"), float("inf"), None, "0.6", 1.5]
)
def test_what_is_not_a_size(size: str) -> None:
    with pytest.raises(ConfigError, match="is not a size: give bytes or text such as '500GB' or '4MiB'"):
        parse_bytes("cache_bytes", size)


@pytest.mark.parametrize("size", [0, -1, "0GB", "-1MB", "0.0001kB"])
def test_a_size_is_at_least_one_byte(size: int | str) -> None:
    with pytest.raises(ConfigError, match="must be at least one byte"):
        parse_bytes("cache_bytes", size)
