"""A checkpoint_dir that is not the same folder for all ranks is an error, at the start or before publishing."""

from __future__ import annotations

import errno
import os
import re
import socket

import pytest
import torch
from regression import build, in_order, squared_error, train_in_order

from dataload.cache.local import run_lock
from dataload.errors import ConfigError
from dataload.train.checkpoint import checkpoints, manifest, places, shared_folder
from dataload.train.checkpoint.checkpoints import Checkpoints
from dataload.train.harness import fit
from dataload.world import World


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != run_lock.LOCK)


def fit_on_a_node_each(folder, **options):
    """Train with a path that is the same on both ranks but leads to different folders."""
    shared_folder.SECONDS = 0
    node = folder / f"node {World.detect().rank}"
    node.mkdir(parents=True)
    os.chdir(node)
    train_in_order(4, checkpoint_dir="run", **options)


@pytest.mark.parametrize("timeout", [None, 30])
def test_a_folder_of_each_node_is_refused_before_the_first_step(ranks, tmp_path, timeout):
    answers = ranks(2, fit_on_a_node_each, tmp_path, timeout=timeout)
    for error in answers:
        assert isinstance(error, ConfigError)
        assert str(error) == (
            f"ranks see different folders as checkpoint_dir: rank 0 created an entry in 'run' on host "
            f"{socket.gethostname()}, ranks [1] do not see it in 'run' on host {socket.gethostname()} (No such file or "
            "directory). Give a folder on a filesystem that all nodes mount"
        )
        assert not hasattr(error, "__notes__")  # which a step adds
    assert names(tmp_path / "node 0" / "run") == []


def fit_with_an_old_checkpoint(folder):
    (folder / "node 0" / "run" / "checkpoint-000001").mkdir(parents=True, exist_ok=True)
    (folder / "node 1" / "run").mkdir(parents=True, exist_ok=True)
    shared_folder.SECONDS = 0
    train_in_order(4, checkpoint_dir=folder / f"node {World.detect().rank}" / "run")


def test_the_ranks_may_have_paths_of_their_own(ranks, tmp_path):
    """The error names the path of each rank that sees another folder."""
    for error in ranks(2, fit_with_an_old_checkpoint, tmp_path):
        assert isinstance(error, ConfigError)
        assert f"ranks [1] do not see it in '{tmp_path}/node 1/run'" in str(error)
        assert "(no such entry)" in str(error)


def fit_by_links(folder, shown_at=None, hidden=False):
    """Train with a link to the folder on each rank. Return the number of pauses between tries.

    Args:
        folder: Where links and folders are created.
        shown_at: The link of rank 1 leads to another folder until this pause.
        hidden: The link of rank 1 leads to another folder from the first step on.
    """
    rank, pauses = World.detect().rank, []
    link = folder / f"link {rank}"

    def lead_to(name):
        (folder / name).mkdir(exist_ok=True)
        (folder / f"{name} {rank}").symlink_to(folder / name)
        (folder / f"{name} {rank}").rename(link)

    def pause(seconds):
        pauses.append(seconds)
        if rank == 1 and len(pauses) == shown_at:
            lead_to("shared")

    lead_to("elsewhere" if rank == 1 and shown_at else "shared")
    shared_folder.sleep = pause
    if hidden:
        shared_folder.SECONDS = 0
    model, optimizer = build()

    def loss(model, batch):
        if rank == 1 and hidden:
            lead_to("elsewhere")
        return squared_error(model, batch)

    fit(model, optimizer, in_order(4), loss, epochs=1, checkpoint_dir=link, progress=False)
    return len(pauses)


def test_a_folder_that_a_node_sees_late_is_waited_for(ranks, tmp_path):
    """For example because an NFS client caches the listing of the folder."""
    assert ranks(2, fit_by_links, tmp_path, shown_at=3) == [3, 3]
    assert names(tmp_path / "shared") == ["checkpoint-000001"]
    assert names(tmp_path / "elsewhere") == []


def test_a_checkpoint_that_lacks_files_is_not_published(ranks, tmp_path):
    for error in ranks(2, fit_by_links, tmp_path, hidden=True):
        assert isinstance(error, ConfigError)
        problem = "is not published, because rank 0 does not see all of __1_0.distcp"
        assert re.search(rf"{tmp_path}/link 0/\.checkpoint-000001-\w+ {problem}", str(error))
    assert [name[:19] for name in names(tmp_path / "shared")] == [".checkpoint-000001-"]


def fit_with_a_stale_entry(folder):
    """Train with an entry in the first checkpoint that is listed but missing until rank 0 pauses."""
    written, first = checkpoints.dcp_save, World.detect().rank == 0

    def write(*args, **kwargs):
        metadata = written(*args, **kwargs)
        for draft in folder.glob(".checkpoint-000001-*") if first else ():
            (draft / "stale").symlink_to("missing")
        return metadata

    def pause(seconds):
        for draft in folder.glob(".checkpoint-*") if first else ():
            (draft / "stale").unlink(missing_ok=True)

    checkpoints.dcp_save, shared_folder.sleep = write, pause
    train_in_order(4, checkpoint_dir=folder)


def test_an_entry_that_is_listed_but_missing_is_looked_up_again(ranks, tmp_path):
    assert ranks(2, fit_with_a_stale_entry, tmp_path) == [None, None]
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


def test_a_checkpoint_that_cannot_be_listed_is_not_published(tmp_path, monkeypatch):
    written = checkpoints.dcp_save

    def add_a_stale_entry(*args, **kwargs):
        metadata = written(*args, **kwargs)
        [draft] = tmp_path.glob(".checkpoint-000001-*")
        (draft / "stale").symlink_to("missing")
        return metadata

    run = Checkpoints(tmp_path, 1)
    monkeypatch.setattr(checkpoints, "dcp_save", add_a_stale_entry)
    with pytest.raises(
        ConfigError, match=r"\.checkpoint-000001-\w+ cannot be checked.*No such file or directory.*stale"
    ):
        run.save({"model": {"x": torch.ones(9)}}, {})
    run.close()
    [draft] = names(tmp_path)
    assert draft.startswith(".checkpoint-000001-")


def test_a_checkpoint_with_a_file_cut_short_is_not_published(tmp_path, monkeypatch):
    written = checkpoints.dcp_save

    def cut_short(*args, **kwargs):
        metadata = written(*args, **kwargs)
        (file,) = tmp_path.glob(".checkpoint-*/*.distcp")
        os.truncate(file, file.stat().st_size - 1)
        return metadata

    run = Checkpoints(tmp_path, 1)
    monkeypatch.setattr(checkpoints, "dcp_save", cut_short)
    with pytest.raises(ConfigError, match=r"does not see all of __0_0\.distcp"):
        run.save({"model": {"x": torch.ones(9)}}, {})
    run.close()
    [draft] = names(tmp_path)
    assert draft.startswith(".checkpoint-000001-")


def fit_with_folder(folders, **options):
    train_in_order(4, checkpoint_dir=folders[World.detect().rank], **options)


def test_all_ranks_have_a_folder_or_none_has(ranks, tmp_path):
    for error in ranks(2, fit_with_folder, (tmp_path, None)):
        assert isinstance(error, ConfigError)
        assert "whether there is a checkpoint_dir: True on ranks [0]; False on ranks [1]" in str(error)


def test_a_folder_that_cannot_be_made_is_refused_on_all_ranks(ranks, tmp_path):
    (tmp_path / "file").touch()
    for error in ranks(2, fit_with_folder, (tmp_path / "file" / "run",) * 2):
        assert isinstance(error, ConfigError)
        assert f"checkpoint_dir '{tmp_path}/file/run': rank 0, on host" in str(error)
        assert "Not a directory" in str(error)


def fit_with_trouble_on_rank_0(folder, name, error):
    shared_folder.SECONDS = 0
    owner, _, attribute = name.rpartition(".")

    def fail(*_, **__):
        raise error

    if World.detect().rank == 0:
        setattr({"manifest": manifest, "places": places}.get(owner, checkpoints), attribute, fail)
    train_in_order(4, checkpoint_dir=folder)


@pytest.mark.parametrize(
    ("name", "error", "kind"),
    [
        ("places._write", PermissionError(errno.EACCES, "on purpose"), PermissionError),
        ("places.sync_folder", OSError(errno.EIO, "on purpose"), OSError),
        ("to_json", ConfigError("on purpose"), ConfigError),
    ],
)
def test_what_fails_on_rank_0_alone_is_raised_on_all_ranks(ranks, tmp_path, name, error, kind):
    (tmp_path / f"{places.UNFINISHED}000001").mkdir()
    for raised in ranks(2, fit_with_trouble_on_rank_0, tmp_path, name, error):
        assert isinstance(raised, kind)
        assert "on purpose" in str(raised)


def test_probes_of_the_killed_are_swept_away(ranks, tmp_path):
    (tmp_path / f"{places.UNFINISHED}probe-0123").mkdir()
    assert ranks(2, fit_with_folder, (tmp_path, tmp_path)) == [None, None]
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


def fit_with_probes_swept(folder):
    """Train while another run removes the probe of this run."""
    found = shared_folder.last_objections

    def look_then_sweep(objection):
        objections = found(objection)
        if World.detect().rank == 0:
            for probe in folder.glob(f"{places.UNFINISHED}probe-*"):
                probe.rmdir()
        return objections

    shared_folder.last_objections = look_then_sweep
    train_in_order(4, checkpoint_dir=folder)


def test_another_run_may_sweep_the_probe(ranks, tmp_path):
    assert ranks(2, fit_with_probes_swept, tmp_path) == [None, None]
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


def test_one_process_finds_at_once_that_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()

    def never(model, batch):
        raise AssertionError("it trains")

    with pytest.raises(ConfigError, match="cannot create a folder there"):
        fit(*build(), in_order(4), never, epochs=1, checkpoint_dir=tmp_path / "file" / "run", progress=False)
    Checkpoints(tmp_path / "run", 1).close()
    assert names(tmp_path / "run") == []
