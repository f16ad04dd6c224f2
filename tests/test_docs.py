"""The code blocks of README and docs run, and the pages are consistent.

A block that cannot run here has `<!-- not run: why -->` above it. The tests check its names and options.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import json
import logging
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
import yaml
from quiet import noise

import dataload
from dataload.benchmarks.suite.figures import Figures
from dataload.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = r"```(?P<kind>python|sh)\n(?P<text>.*?)^```$"
BLOCK = re.compile(rf"^(?:<!-- not run: (?P<why>[^\n]+) -->\n\n?)?{FENCE}", re.MULTILINE | re.DOTALL)
KNOWN = {  # functions whose options the pages use
    "make_loader": "dataload.loader.factory",
    "make_dataset": "dataload.dataset",
    "mix": "dataload.mixture",
    "fit": "dataload.train.harness",
}
CLASSES, ROWS = 10, 96


@dataclass
class Block:
    page: Path
    line: int
    kind: str
    text: str
    why: str | None

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page):
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start("text")) + 1, found["kind"], found["text"], found["why"])
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
_, PLAIN_DDP = [block for block in BLOCKS if block.page.name == "README.md" and block.kind == "python"]
[QUICK_START] = [block for block in BLOCKS if block.page.name == "index.md" and block.kind == "python"]


def parquet(**columns):
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=ROWS // 8)
    return sink.getvalue()


def arrays(numbers):
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), numbers.shape[1])


def png(pixels):
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def objects():
    """Yield key and body of the objects in s3://bucket/ that the pages read."""
    noise = np.random.default_rng(0)
    label, count = np.arange(ROWS) % CLASSES, np.arange(ROWS)
    images = noise.integers(0, 256, (ROWS, 784), np.uint8)
    yield "train/part-0.parquet", parquet(image=arrays(images), label=label)
    yield "pixels/part-0.parquet", parquet(image=[image.tobytes() for image in images], label=label)
    photos = [png(image.reshape(28, 28)) for image in images]
    yield "photos/part-0.parquet", parquet(image=photos, label=label)
    for day in range(1, 4):
        yield (
            f"clicks/day={day}/part-0.parquet",
            parquet(
                price=noise.random(ROWS, np.float32),
                clicks=noise.random(ROWS, np.float32),
                age=pa.array([None if one % 7 == 0 else one for one in range(ROWS)], pa.float32()),
                bought=count % 2,
            ),
        )
    yield "tokens/part-0.parquet", parquet(tokens=arrays(noise.integers(0, 256, (ROWS, 64), np.int32)))
    yield "documents/part-0.parquet", parquet(tokens=pa.array([np.arange(one % 9, dtype=np.int32) for one in count]))
    yield "x.parquet", parquet(x=count)


@pytest.fixture(scope="module")
def bucket_of_pages(server):
    key = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=server.endpoint_url, **key)
    client.create_bucket(Bucket="bucket", ACL="public-read")
    for name, body in objects():
        client.put_object(Bucket="bucket", Key=name, Body=body, ACL="public-read")
    return server


@pytest.fixture
def reader(bucket_of_pages, tmp_path, monkeypatch):
    """Set an empty working folder, and S3 in the usual AWS environment."""
    environment = {
        "AWS_ENDPOINT_URL": bucket_of_pages.endpoint_url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "home"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    bucket_of_pages.reset()
    return bucket_of_pages


def run_python(block, text, names):
    exec(compile("\n" * (block.line - 1) + text, str(block.page), "exec"), names)


def run_shell(block, text, monkeypatch):
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "dataload", f"{block}: {line}: give the block a mark <!-- not run: why -->"
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            app.main()
        assert ended.value.code == 0, f"{block}: {line}"


NEEDED = {"docs/guides/tables.md": ["deltalake"]}  # packages that the blocks of a page import

WARNINGS = {  # that a page causes on purpose, and one of torch about the cost of workers on a small machine
    "docs/guides/filters.md": "is replaced",
    "docs/guides/replay.md": "epoch ",
    "docs/guides/scale.md": "USDT:",  # the lines of torch's profiler
    "docs/loader.md": "worker processes in total",
}


@pytest.mark.parametrize("page", sorted({str(block.page.relative_to(ROOT)) for block in BLOCKS if not block.why}))
def test_blocks_run(page, reader, tmp_path, monkeypatch, capfd, caplog):
    """The blocks of a page run from top to bottom as one program, which says nothing but progress and costs."""
    for package in NEEDED.get(page, ()):
        pytest.importorskip(package)
    names = {"__name__": "__main__"}
    with warnings.catch_warnings(record=True) as warned:
        warnings.resetwarnings()
        for hidden in (
            DeprecationWarning,
            PendingDeprecationWarning,
            ResourceWarning,
        ):  # as Python hides those of others
            warnings.filterwarnings("ignore", category=hidden)
        for block in blocks_of(ROOT / page):
            if block.why is None:
                text = block.text.replace("/nvme/", f"{tmp_path}/")
                if block.kind == "python":
                    run_python(block, text, names)
                else:
                    run_shell(block, text, monkeypatch)
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    written = [capfd.readouterr().err, *logged, *(str(warning.message) for warning in warned)]
    assert noise("\n".join(written), *filter(None, [WARNINGS.get(page)])) == []


def test_the_quick_start_is_a_whole_program(reader):
    """The quick start runs in its own process and reads S3 once for ten epochs."""
    assert len(QUICK_START.text.splitlines()) <= 15
    Path("train.py").write_text(QUICK_START.text)
    ran = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert noise(ran.stderr) == []
    assert ran.stdout.startswith(f"epoch 9: {ROWS} rows in ")
    assert "0 bytes from the origin" in ran.stdout
    size = len(dict(objects())["train/part-0.parquet"])
    assert size <= reader.stats()["get_bytes"] <= 1.1 * size
    assert Path("checkpoints").is_dir()
    assert len(Path("stats/rank-0.jsonl").read_text().split("\n")) > 10  # at least one line for each epoch


def run_rank(folder, environ):
    """Run ddp.py on this rank, with files for what it writes."""
    os.chdir(folder)
    os.environ.update(environ)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}-{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY), descriptor)
    runpy.run_path("ddp.py", run_name="__main__")
    sys.stdout.flush()


def test_each_of_two_ranks_reads_half_of_the_rows_in_the_plain_loop(reader, ranks):
    Path("ddp.py").write_text(f"{PLAIN_DDP.text}\nassert not dist.is_initialized()  # NCCL would warn of it\n")
    assert ranks(2, run_rank, Path.cwd(), dict(os.environ)) == [None] * 2
    for rank in (0, 1):
        assert noise(Path(f"err-{rank}").read_text()) == []
        assert f"epoch 9, rank {rank} of 2: {ROWS // 2} rows in " in Path(f"out-{rank}").read_text()
    assert reader.stats()["get_bytes"] <= 1.1 * len(dict(objects())["train/part-0.parquet"])


@pytest.mark.slow
def test_the_plain_loop_runs_under_torchrun(reader):
    Path("ddp.py").write_text(PLAIN_DDP.text)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ddp.py"]
    ran = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert noise(ran.stderr, "OMP_NUM_THREADS", "*****") == []  # of torchrun
    for rank in (0, 1):
        assert f"epoch 9, rank {rank} of 2: {ROWS // 2} rows in " in ran.stdout


def test_every_block_that_is_not_run_says_why():
    for page in PAGES:
        text = page.read_text()
        fences = re.findall(r"^ *``` *(?:python|py|sh|bash|shell|console)\b", text, re.MULTILINE)
        assert len(fences) == len(blocks_of(page)), f"{page.name}: a block that is indented, or of another name"
        assert len(re.findall(r"^<!-- not run:", text, re.MULTILINE)) == sum(
            block.why is not None for block in blocks_of(page)
        ), page.name


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.why], ids=str)
def test_what_is_not_run_could_be(block):
    if block.kind == "sh":
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                check_command(words)
    else:
        check_python(block.text)


def check_command(words):
    """Check that the names of a command exist in this repository and that its parser accepts the options."""
    if words[0] == "dataload":
        group = typer.main.get_command(app.app)
        rest = words[1:]
        while isinstance(group, typer.core.TyperGroup):
            with group.make_context("dataload", list(rest)) as context:
                name, group, rest = group.resolve_command(context, rest)
        group.make_context(name, rest)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.search(r"\[(.*)\]", words[2])
        assert words[1] == "install"
        assert set(named[1].split(",") if named else []) <= extras.keys()
    elif words[0] != "export":
        if words[0] == "srun":
            words = [*dropwhile(lambda word: word.startswith("--"), words[1:])]
        if words[:2] in (["bash", "-c"], ["sh", "-c"]):
            check_command(shlex.split(words[2]))
            return
        if words[0] == "torchrun":
            from torch.distributed.run import get_args_parser

            parsed = get_args_parser().parse_args(words[1:])
            words = ["python", parsed.training_script, *parsed.training_script_args]
        assert words[0] == "python"
        assert (ROOT / words[1]).exists()
        assert words[2:] in (["TRAIN", "HELD_OUT"], ["$@"])


def check_python(text):
    """Check that a text is Python and that the options of known functions exist."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        tree = ast.parse(re.sub(r"^ *\.\.\.\n", "", text, flags=re.MULTILINE))  # an excerpt with omitted arguments
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in KNOWN:
            function = getattr(importlib.import_module(KNOWN[call.func.id]), call.func.id)
            named = {keyword.arg for keyword in call.keywords if keyword.arg}
            assert named <= inspect.signature(function).parameters.keys()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("dataload warm s3://bucket/ --shards 0/4", "sh"),
        ("dataload wram s3://bucket/", "sh"),
        ("make teas", "sh"),
        ("pip install '.[demos]'", "sh"),
        ("torchrun --nprocs-per-node 8 examples/train_ddp.py TRAIN HELD_OUT", "sh"),
        ("python train_ddp.py TRAIN HELD_OUT", "sh"),
        ("srun --ntasks-per-node=1 bash -c 'dataload wram s3://bucket/'", "sh"),
        ("make_loader(..., clutser='valkey://host')", "python"),
        ("make_loader(", "python"),
    ],
)
def test_what_could_not_be_run_is_found(text, kind, capsys):
    with pytest.raises(BaseException) as found:
        test_what_is_not_run_could_be(Block(ROOT / "README.md", 1, kind, text, "because"))
    assert not isinstance(found.value, KeyboardInterrupt)


def test_set_epoch_of_hugging_face_reaches_the_dataset_of_the_loader():
    """Each method of a streaming dataset returns another one."""
    page = (ROOT / "docs/migrate.md").read_text()
    assert "rows.set_epoch(epoch)" in page
    assert "StatefulDataLoader(rows, " in page


def test_the_init_containers_of_kubernetes_could_run():
    page = (ROOT / "docs/recipes.md").read_text()
    [manifest] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    _, job = yaml.safe_load_all(manifest)
    containers = job["spec"]["template"]["spec"]["initContainers"]
    assert [container["name"] for container in containers] == ["doctor", "warm"]
    for container in containers:
        check_command(container["command"])


def test_several_pods_of_kubernetes_share_the_node():
    """A quarter of the GPUs, processes, CPUs and memory that the manifest gives a pod."""
    page = (ROOT / "docs/recipes.md").read_text()
    _, job = yaml.safe_load_all(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    [container] = job["spec"]["template"]["spec"]["containers"]
    gpus, memory = container["resources"]["limits"].values()
    [processes] = re.findall(r"--nproc-per-node (\d+)", container["command"][-1])
    cpus = container["resources"]["requests"]["cpu"]
    for share in (
        f"`nvidia.com/gpu: {gpus // 4}`",
        f"`--nproc-per-node {int(processes) // 4}`",
        f"`cpu: {cpus // 4}`",
        f"`memory: {int(memory.removesuffix('Gi')) // 4}Gi`",
    ):
        assert share in page


def test_a_local_s3_is_read_with_the_settings_of_the_page(tmp_path, monkeypatch):
    page = (ROOT / "docs/recipes.md").read_text()
    [paragraph] = re.findall(r"^\*\*A local S3.*?\n\n", page, re.MULTILINE | re.DOTALL)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # without credentials
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in re.findall(r"(AWS_\w+)=(\w+)", paragraph):
        monkeypatch.setenv(name, value)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "x.parquet").write_bytes(parquet(x=range(8)))
    command = [sys.executable, "-m", "dataload.benchmarks.origin", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        monkeypatch.setenv("AWS_ENDPOINT_URL", serving.stdout.readline().strip())
        try:
            assert dataload.make_dataset("s3://bucket/", cache=False).num_rows == 8
        finally:
            serving.terminate()


def test_the_page_on_ddp_has_the_example():
    example = (ROOT / "examples/train_plain_ddp.py").read_text()
    assert f"```python\n{example}```" in (ROOT / "docs/guides/ddp.md").read_text()


def test_batches_have_as_many_labels_as_the_page_says(capsys):
    [block] = [block for block in BLOCKS if "ten row groups, one for each label" in block.text]
    run_python(block, block.text, {})
    [stated] = re.findall(r"# True: ([\d ]+);", block.text)
    assert capsys.readouterr().out.splitlines()[0] == f"[{', '.join(stated.split())}]"


def test_links_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in target and not target.startswith("#"):
                assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            assert f": {page.relative_to(ROOT / 'docs')}\n" in config


def test_every_command_is_named():
    page = (ROOT / "docs/commands.md").read_text()
    commands = typer.main.get_command(app.app).commands
    for name in [*(commands.keys() - {"cache"}), *(f"cache {name}" for name in commands["cache"].commands)]:
        assert f"| `dataload {name}" in page, name


def test_what_the_reference_names_is_there():
    for name in re.findall(r"^::: (\S+)", (ROOT / "docs/reference.md").read_text(), re.MULTILINE):
        assert pkgutil.resolve_name(name).__doc__, name


def test_the_reference_lists_each_public_name_and_its_module():
    page = (ROOT / "docs/reference.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| [^|]+ \| `([^|]+)` \|", page, re.MULTILINE))
    assert [name for name in dataload.__all__ if name not in rows] == []
    for name, path in rows.items():
        found = pkgutil.resolve_name(f"dataload.{name}")
        assert Path(inspect.getsourcefile(inspect.unwrap(found))).resolve() == ROOT / path, name
        assert f"::: dataload.{name}\n" in page or issubclass(found, dataload.DataloadError), name
    assert "docs/reference.md" in (ROOT / "README.md").read_text()


def test_the_readme_has_the_seconds_of_the_published_results():
    """Those of ten epochs of images, of each loader that was not stopped."""
    results = json.loads((ROOT / "benchmarks/results/latest.json").read_text())
    figures, [images] = Figures(results), [name for name in results["datasets"] if name.startswith("images")]
    work = 10 * results["datasets"][images]["epoch_seconds"]
    page = " ".join((ROOT / "README.md").read_text().split())
    assert f"images, {work:.0f} s of GPU work" in page
    for loader in [entry.name for entry in figures.entries if entry.kind != "reference"]:
        share = figures.share(images, loader, 1)
        if share.kind == "measured":
            said = "take" if loader == "dataload" else loader.replace(",", "")
            assert re.search(rf"{said}( takes)? {work / share.value:.0f} s", page), loader


def test_the_picture_of_the_order_is_of_this_order():
    names = runpy.run_path(str(ROOT / "docs/pictures/draw.py"))
    assert names["picture"]() == (ROOT / "docs/pictures/order.svg").read_text()


@pytest.mark.slow
def test_the_pages_build_and_fetch_nothing(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    assert built.returncode == 0, built.stderr.decode()


@pytest.mark.parametrize(
    ("html", "fetched"),
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ('<link rel="preconnect" href="//fonts.example">', True),
        ('<link href="https://fonts.example/x.css" rel="stylesheet">', True),
        ('<img src="http://badge.example/x.svg">', True),
        ('<link rel="canonical" href="https://here.example/">', False),
        ('<a href="https://elsewhere.example/">a link</a>', False),
        ('<script src="assets/x.js"></script>', False),
    ],
)
def test_what_a_browser_would_fetch_is_found(html, fetched):
    names = runpy.run_path(str(ROOT / "docs/offline.py"))
    assert bool(names["foreign"](html)) == fetched
