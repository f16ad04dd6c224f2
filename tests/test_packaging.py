"""The wheel holds every module that users run, and its modules can be imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UNSHIPPED = ("cold", "micro")  # benchmarks that neither `dataload bench` nor `dataload demo` needs
LINKED = ("benchmarks", "cache", "samplers")  # top-level folders that install below dataload


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, folder, source], check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {"dataload/py.typed"}
    for path in (ROOT / "dataload").rglob("*.py"):
        if path.relative_to(ROOT / "dataload").parts[0] not in LINKED:
            expected.add(str(path.relative_to(ROOT)))
    for name in LINKED:
        expected |= {
            f"dataload/{path.relative_to(ROOT)}"
            for path in (ROOT / name).rglob("*.py")
            if path.parent.name not in UNSHIPPED
        }
    assert held == expected


@pytest.mark.slow
def test_it_installs_into_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True)

    def run(program: str) -> str:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        options = {"check": True, "capture_output": True, "text": True, "cwd": tmp_path, "env": environ}
        return subprocess.run([python, "-c", program], **options).stdout

    # The light modules import without any dependency.
    run("import dataload, dataload.errors, dataload.cache, dataload.samplers, sys; assert 'torch' not in sys.modules")
    # The other modules import with the dependencies of this environment, but without its checkout.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = run(
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)];"
        "import dataload.loader.loader, dataload.cache.filesystem, dataload.samplers.sharded, fsspec;"
        "assert fsspec.get_filesystem_class('tiercache') is dataload.cache.filesystem.TierCacheFileSystem;"
        "print(dataload.__file__, dataload.cache.__file__, dataload.samplers.__file__)"
    )
    assert all(place.startswith(site) for place in where.split())


def test_make_wheel_installs_no_development_environment(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "wheel", f"VENV={tmp_path / 'missing'}"]
    planned = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "pip wheel" in planned
    assert "pip install" not in planned


def test_the_top_level_folders_are_linked() -> None:
    for name in LINKED:
        assert (ROOT / "dataload" / name).is_symlink()
        assert (ROOT / "dataload" / name).readlink() == Path("..") / name
    assert {path.name for path in (ROOT / "samplers").iterdir() if path.is_dir()} <= {"__pycache__", "mixture"}
