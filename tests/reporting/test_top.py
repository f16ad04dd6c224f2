"""`dataload top` shows what the ranks of a run do now, and believes no file."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import until
from rich.console import Console
from runs import BEGAN, write_pass

from dataload import make_loader
from dataload.reporting.live import figures, view
from dataload.telemetry import stats_log
from dataload.telemetry.stats_log import TAILS, read_latest

TOP = [sys.executable, "-m", "dataload", "top"]
NOW = BEGAN + 61.0
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def write_three(folder):
    """Write an epoch of 100 batches of three ranks: one waits, the last one ends early without saying so."""
    for rank, seconds in ((0, 60), (1, 60), (2, 20)):
        sample = {"rows": 1000, "hits": 9, "misses": 1, "bytes_origin": 10_000_000, "origin": 0.3 * (rank == 1)}
        samples = [{**sample, "decode": 0.1} for _ in range(seconds)]
        samples[0]["total_batches"] = 100
        if seconds == 60:
            samples[50:] = [{**each, "rows": 500} for each in samples[50:]]
        write_pass(folder, rank, 3, BEGAN, samples, ended=False)


def shown(folder, now=NOW, width=80, height=None):
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(view(figures(read_latest(folder), now), width, height))
    return captured.get()


def test_figures_say_what_each_rank_does_now(tmp_path):
    write_three(tmp_path)
    found = figures(read_latest(tmp_path), NOW)
    assert (found["epoch"], found["state"], found["slowest"]) == (3, "running", 1)
    assert [found["ranks"][rank]["state"] for rank in "012"] == ["running", "running", "silent"]
    assert found["ranks"]["2"]["seconds_since"] == pytest.approx(41)
    # 50,000 of its rows took 50 s, and the last 5,000 took 10 s, as the end of the file knows.
    assert found["ranks"]["0"]["rows_per_second"] < 1000
    assert found["ranks"]["2"]["rows_per_second"] == 0
    assert found["rows_per_second"] == sum(found["ranks"][rank]["rows_per_second"] for rank in "01")
    rate = found["ranks"]["0"]["rows_per_second"]
    assert found["seconds_to_go"] == pytest.approx(40 * (55_000 / 60) / rate)
    assert found["waits"]["origin"] == pytest.approx(0.3 * 60 / (60 + 60 + 20))
    assert found["ranks"]["1"]["waits"]["origin"] == pytest.approx(0.3)
    assert found["advice"].startswith("mostly on origin: the origin is the limit")
    assert found["bytes_origin"] == 140 * 10_000_000
    assert json.loads(json.dumps(found)) == found


def test_the_rate_is_that_of_the_last_lines(tmp_path):
    samples = [{"rows": 1000 if second < 500 else 100} for second in range(600)]
    write_pass(tmp_path, 0, 0, BEGAN, samples, ended=False)
    assert (tmp_path / "rank-0.jsonl").stat().st_size > 2 * TAILS[0]
    assert figures(read_latest(tmp_path), BEGAN + 600)["rows_per_second"] == pytest.approx(100)


def test_the_table_fits_the_terminal(tmp_path):
    write_three(tmp_path)
    narrow, wide = shown(tmp_path), shown(tmp_path, width=140)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow + wide
    assert narrow.splitlines()[0] == "epoch 3: 47% of the batches, about 40 s to go"
    rows = [line.split() for line in narrow.splitlines() if re.match(r" *\d+ +(silent|\d+%)", line)]
    assert [row[0] for row in rows] == ["2", "1", "0"]  # the silent one, then by how long they wait
    assert rows[0][1:4] == ["silent", "41", "s"]
    assert rows[1][:2] == ["1", "60%"]
    assert "origin 30%, decode 10%" in wide
    [late] = figures(read_latest(tmp_path), NOW)["late"]
    assert re.match(r"rank 1 \(.*\) waited 18.0 s longer for data than the median rank, mostly on origin", late)
    assert f"slowest: {late}" in " ".join(wide.split())


def test_a_rank_that_hardly_waits_gets_no_advice(tmp_path):
    write_pass(tmp_path, 0, 0, BEGAN, [{"rows": 10, "collate": 0.01}] * 9, ended=False)
    lines = " ".join(shown(tmp_path, BEGAN + 10, width=140).splitlines())
    assert "waits 1% of the time " in lines
    assert "is the limit" not in lines


def test_of_many_ranks_the_slowest_are_shown(tmp_path):
    for rank in range(30):
        write_pass(tmp_path, rank, 0, BEGAN, [{"rows": 10, "disk": rank / 100}] * 50, ended=False)
    lines = shown(tmp_path, BEGAN + 51, height=20).splitlines()
    assert len(lines) <= 20
    table = next(number for number, line in enumerate(lines) if line.startswith("rank"))
    assert lines[table + 1].split()[0] == "29"
    assert lines[-1] == f"and {30 - (len(lines) - table - 2)} more ranks"


def test_a_run_that_ended_and_one_without_news_are_told_apart(tmp_path):
    write_pass(tmp_path / "ended", 0, 4, BEGAN, [{"rows": 10}] * 5)
    write_pass(tmp_path / "killed", 0, 4, BEGAN, [{"rows": 10}] * 5, ended=False)
    assert shown(tmp_path / "ended", BEGAN + 3605).startswith("epoch 4: ended 60 min ago\n")
    assert shown(tmp_path / "killed", BEGAN + 3605).startswith("epoch 4: no news for 60 min: the run was killed, or is")
    assert figures(read_latest(tmp_path / "ended"), BEGAN + 6)["state"] == "ended"


def test_lines_of_a_long_epoch_come_less_often(tmp_path):
    write_pass(tmp_path, 0, 0, BEGAN, [{"rows": 10, "seconds": 99_999}], ended=False)
    for since, state in ((300, "running"), (400, "silent")):
        assert figures(read_latest(tmp_path), BEGAN + 100_000 + since)["state"] == state


def test_ranks_of_an_earlier_start_are_not_shown(tmp_path):
    for rank in range(3):
        write_pass(tmp_path, rank, 0, BEGAN, [{"rows": 10}] * 5, ended=False)
    write_pass(tmp_path, 0, 0, BEGAN + 100, [{"rows": 10, "world_size": 2}], ended=False)
    text = (tmp_path / "rank-0.jsonl").read_text()
    (tmp_path / "rank-0.jsonl").write_text(text.replace('"world_size": 0', '"world_size": 2'))
    found = figures(read_latest(tmp_path), BEGAN + 101)
    assert [*found["ranks"]] == ["0", "1"]
    assert found["ranks"]["1"]["state"] == "silent"


def test_a_loop_can_be_watched(tmp_path, dataload, monkeypatch):
    monkeypatch.setattr(stats_log, "EVERY", 0.0)
    pq.write_table(pa.table({"id": np.arange(1000)}), tmp_path / "rows.parquet")
    loader = make_loader(tmp_path / "rows.parquet", 10, cache=False, stats_dir=tmp_path / "stats")
    for _, _ in zip(range(40), loader, strict=False):
        code, said, _ = dataload("top", tmp_path / "stats", "--json")
    found = json.loads(said)
    assert (code, found["state"], found["epoch"]) == (0, "running", 0)
    assert (found["batches"], found["total_batches"], loader.stats().total_batches) == (40, 100, 100)
    assert found["wait_p99"] == loader.stats().wait_p99 > 0
    assert found["seconds_to_go"] > 0
    state = loader.state_dict()
    resumed = make_loader(tmp_path / "rows.parquet", 10, cache=False)
    resumed.load_state_dict(state)
    list(resumed)
    assert resumed.stats().total_batches == resumed.stats().batches == 60


def test_a_folder_without_runs_is_wrong_use(tmp_path, dataload):
    for folder in (tmp_path, tmp_path / "missing"):
        code, out, said = dataload("top", folder)
        assert (code, out) == (2, "")
        assert said.startswith(f"dataload: {folder} holds no statistics of a run: pass the folder that make_loader got")


def test_without_a_terminal_one_reading_is_printed(tmp_path, dataload):
    write_three(tmp_path)
    code, said, _ = dataload("top", tmp_path)
    assert code == 0
    assert said.startswith("epoch 3: no news for ")
    assert not CONTROL.search(said)


def planted(folder):
    """Write a run, one line of which somebody else has changed, and other files where those of ranks are."""
    write_three(folder)
    line = json.loads((folder / "rank-0.jsonl").read_text().splitlines()[-1])
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[bold red]\ud800\n" * 50
    line |= {"rank": 7, "process": 7, "host": evil, "settings": [evil], "rows_by_source": {evil: 1}}
    (folder / "rank-7.jsonl").write_text(json.dumps(line))
    (folder / "rank-8.jsonl").mkdir()
    os.mkfifo(folder / "rank-9.jsonl")
    (folder / "rank-10.jsonl").symlink_to("/dev/zero")
    (folder / "rank-11.jsonl").write_bytes(b"\xff\x00[" * 100_000)
    (folder / "rank-12.jsonl").write_text("[" * 100_000)
    (folder / "rank-\x1b[2J.jsonl").write_text(json.dumps({**line, "rank": 13, "batches": 10**17, "began": 10**17}))
    (folder / "rank-\x1b[1J.jsonl").mkdir()
    (folder / "rank-14.jsonl").write_text(json.dumps({**line, "rank": 10**17, "host": ["a"]}))


@pytest.mark.parametrize("width", [80, 140])
def test_planted_files_reach_no_terminal_and_crash_nothing(tmp_path, width):
    planted(tmp_path)
    text = shown(tmp_path, width=width)
    assert not CONTROL.search(text)
    assert "\u202e" not in text
    assert "[bold red]" in shown(tmp_path, width=2000)  # as text
    assert {*figures(read_latest(tmp_path), NOW)["ranks"]} == {"0", "1", "2", "7", "13"}


def test_the_report_believes_planted_files_no_more(tmp_path, dataload, caplog):
    planted(tmp_path)
    code, said, _ = dataload("report", tmp_path, "--metrics", tmp_path / "run.prom")
    assert code == 0
    assert "by source: ?]0;owned" in said
    assert "rank-9.jsonl, which cannot be read: it is not a regular file" in caplog.text
    assert not CONTROL.search(said + caplog.text)
    assert "\u202e" not in said


def test_a_rank_that_its_world_does_not_have_is_shown(tmp_path):
    write_pass(tmp_path, 3, 0, BEGAN, [{"rows": 10}] * 5)
    text = (tmp_path / "rank-3.jsonl").read_text()
    (tmp_path / "rank-3.jsonl").write_text(text.replace('"world_size": 0', '"world_size": 2'))
    assert [*figures(read_latest(tmp_path), NOW)["ranks"]] == ["3"]


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, words, width=80, height=24):
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(width), "LINES": str(height)}
        self.ours, theirs = pty.openpty()
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.program = subprocess.Popen(words, **streams, env=environ, start_new_session=True)
        os.close(theirs)
        self.text = ""

    def read_until(self, end):
        """Read until the program has written some text; None: until it has closed the terminal."""
        while end is None or end not in self.text:
            assert select.select([self.ours], [], [], 120)[0], self.text
            try:
                self.text += os.read(self.ours, 1 << 16).decode()
            except OSError:  # It has closed the terminal.
                assert end is None, self.text
                return


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_leaves_the_terminal_as_it_was(tmp_path, end):
    write_three(tmp_path)
    terminal = Terminal([*TOP, str(tmp_path)])
    terminal.read_until("rank 1 (")
    terminal.program.send_signal(signal.SIGTSTP)  # Ctrl-Z does nothing
    terminal.program.send_signal(end)
    terminal.read_until(None)
    assert terminal.program.wait(120) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGQUIT: 131}[end]
    os.close(terminal.ours)
    assert terminal.text.count("\x1b[?1049h") == 1
    after = terminal.text.rpartition("\x1b[?1049l")
    assert after[1], "it still shows the other screen"
    assert "\x1b[?25h" in terminal.text.rpartition("\x1b[?25l")[2], "the cursor is hidden"
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("width", [80, 140])
def test_tmux_shows_it(tmp_path, width):
    if (tmux := shutil.which("tmux")) is None:
        pytest.skip("tmux is not installed: apt-get install tmux")
    write_three(tmp_path / "stats")
    tmux = [tmux, "-S", os.path.relpath(tmp_path / "socket"), "-f", "/dev/null"]
    words = ["env", "-u", "COLUMNS", "-u", "LINES", *TOP, str(tmp_path / "stats")]
    subprocess.run([*tmux, "new-session", "-d", "-x", str(width), "-y", "24", *words], check=True)

    def screen():
        return subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout

    try:
        until(lambda: "rank 1 (" in screen())
        lines = screen().splitlines()
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    assert lines[0].startswith("epoch 3: no news for ")
    assert max(map(len, lines)) <= width
    names = lines[next(number for number, line in enumerate(lines) if line.startswith("rank "))].split()
    assert names[-3:] == ["p99", "hits", "origin"]
    assert ("host" in names) == (width == 140)
