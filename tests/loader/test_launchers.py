"""Clusters as each launcher describes them: the same streams, and each byte from the origin once."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from dataload import CacheConfig, World, make_dataset, make_loader
from dataload.errors import ConfigError
from dataload.formats import parquet
from dataload.launchers import find_contradiction
from dataload.loader import capacity, ranks
from dataload.samplers.sharded import ShardedSampler
from dataload.world import read_environment

EQUAL, UNEQUAL = (2, 2, 2, 2), (3, 1)
GROUPS, ROWS = 24, 400  # row groups; rows of each


def places(sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, node, local rank)."""
    rank = 0
    for node, size in enumerate(sizes):
        for local in range(size):
            yield rank, node, local
            rank += 1


def tasks(sizes: tuple[int, ...]) -> str:
    """Return the sizes as Slurm writes them."""
    if len(set(sizes)) == 1 and len(sizes) > 1:
        return f"{sizes[0]}(x{len(sizes)})"
    return ",".join(map(str, sizes))


def torchrun(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        {"RANK": rank, "WORLD_SIZE": sum(sizes), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": sizes[node]}
        | {"GROUP_RANK": node, "GROUP_WORLD_SIZE": len(sizes)}
        for rank, node, local in places(sizes)
    ]


def srun(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": sum(sizes), "SLURM_LOCALID": local, "SLURM_NODEID": node}
        | {"SLURM_STEP_NUM_NODES": len(sizes), "SLURM_STEP_TASKS_PER_NODE": tasks(sizes), "SLURM_DISTRIBUTION": "block"}
        for rank, node, local in places(sizes)
    ]


def deepspeed(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        {"RANK": rank, "WORLD_SIZE": sum(sizes), "LOCAL_RANK": local, "LOCAL_SIZE": sizes[node]}
        | {"CROSS_RANK": node, "CROSS_SIZE": len(sizes)}
        for rank, node, local in places(sizes)
    ]


def open_mpi(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": sum(sizes), "OMPI_COMM_WORLD_LOCAL_RANK": local}
        | {"OMPI_COMM_WORLD_LOCAL_SIZE": sizes[node]}
        for rank, node, local in places(sizes)
    ]


def mpich(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        {"PMI_RANK": rank, "PMI_SIZE": sum(sizes), "MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": sizes[node]}
        for rank, node, local in places(sizes)
    ]


def ray(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        {"RANK": rank, "WORLD_SIZE": sum(sizes), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": sizes[node]}
        | {"NODE_RANK": node, "MASTER_ADDR": "10.0.0.1"}
        for rank, node, local in places(sizes)
    ]


def exported(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """A script under srun that sets only the variables that init_process_group needs."""
    return [own | {"RANK": rank, "WORLD_SIZE": sum(sizes)} for rank, own in enumerate(srun(sizes))]


def srun_pmi2(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """`srun --mpi=pmi2` sets two variables of MPICH, too."""
    return [own | {"PMI_RANK": rank, "PMI_SIZE": sum(sizes)} for rank, own in enumerate(srun(sizes))]


def in_slurm(processes: list[dict[str, Any]], sizes: tuple[int, ...], first: int) -> list[dict[str, Any]]:
    """Add the variables of a step of Slurm with one task, such as a daemon of MPI, on each node from `first` on."""
    step = srun((1,) * (len(sizes) - first))
    nodes = [node for _, node, _ in places(sizes)]
    return [step[node - first] | own if node >= first else own for node, own in zip(nodes, processes, strict=True)]


def mpirun_in_slurm(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Open MPI starts no daemon on the node of mpirun itself."""
    return in_slurm(open_mpi(sizes), sizes, 1)


def mpiexec_in_slurm(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return in_slurm(mpich(sizes), sizes, 0)


def mpirun_in_a_shell(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """The shell is the only task of a step, as those of salloc."""
    return [srun((1,))[0] | own for own in open_mpi(sizes)]


def mpiexec_in_a_shell(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [srun((1,))[0] | own for own in mpich(sizes)]


def srun_in_mpirun(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [open_mpi((1,))[0] | own for own in srun(sizes)]


def worlds(launcher: Callable[[tuple[int, ...]], list[dict[str, Any]]], sizes: tuple[int, ...]) -> list[World]:
    return [read_environment({name: str(value) for name, value in own.items()}) for own in launcher(sizes)]


IN_SLURM = [mpirun_in_slurm, mpiexec_in_slurm, mpirun_in_a_shell, mpiexec_in_a_shell]
EVERY = [torchrun, srun, srun_pmi2, deepspeed, open_mpi, mpich, ray, exported, *IN_SLURM, srun_in_mpirun]
KNOWING = [torchrun, srun, deepspeed, srun_pmi2, exported, srun_in_mpirun]  # the number of nodes


def test_the_number_of_a_node_shows_unequal_nodes() -> None:
    """Ray Train says the node of a rank, but not how many nodes there are. Nodes of 2, 1 and 1 ranks."""
    ray = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"}
    with pytest.raises(ConfigError, match="rank 2 is on node 1 of 1 ranks: nodes have unequal"):
        read_environment(ray)
    assert read_environment({**ray, "NODE_RANK": "2"}).num_nodes == 4


@pytest.mark.parametrize("launcher", EVERY)
def test_equal_nodes(launcher: Any) -> None:
    expected = [World(rank, 8, local, 2) for rank, _, local in places(EQUAL)]
    assert worlds(launcher, EQUAL) == expected
    assert {(world.num_nodes, world.num_streams, world.node_share) for world in expected} == {(4, 4, 0.25)}


@pytest.mark.parametrize("launcher", [srun_pmi2, exported])
def test_ranks_that_meet_on_one_host_know_their_local_ranks(launcher: Any) -> None:
    expected = [World(rank, 4, rank, 4) for rank in range(4)]
    processes = [{**own, "MASTER_ADDR": "localhost"} for own in launcher((4,))]
    assert [read_environment({name: str(value) for name, value in own.items()}) for own in processes] == expected


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [3, 0, 1, 2]])
@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_ranks_that_a_script_numbers_in_another_order_agree_on_the_streams(order: Any, distribution: str) -> None:
    """Some ranks may keep their number, so they cannot tell."""
    script = {"WORLD_SIZE": 4, "SLURM_DISTRIBUTION": distribution}
    environs = [own | script | {"RANK": rank} for rank, own in zip(order, srun((2, 2)), strict=True)]
    found = worlds(lambda _: environs, (2, 2))
    assert [world.rank for world in found] == order
    assert {(world.num_streams, world.node_share) for world in found} == {(2 if distribution == "block" else 4, 0.5)}


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [3, 0, 1, 2]])
def test_ranks_that_a_process_group_numbers_in_another_order_agree_on_the_streams(order: Any) -> None:
    for launcher in (srun, torchrun, exported):
        environs = [{name: str(value) for name, value in own.items()} for own in launcher((2, 2))]
        found = [read_environment(own, (rank, 4)) for rank, own in zip(order, environs, strict=True)]
        assert [world.rank for world in found] == order
        assert {world.num_streams for world in found} == {2}


def test_a_process_group_does_not_hide_unequal_nodes() -> None:
    """Only some ranks can tell, so they must not go on with another number of streams than the others."""
    own = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"}
    with pytest.raises(ConfigError, match="rank 2 is on node 1 of 1 ranks: nodes have unequal"):
        read_environment(own, (2, 4))


def test_a_process_group_knows_the_rank_that_a_launcher_does_not_say() -> None:
    environs = [{"WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"} for rank in range(4)]
    found = [read_environment(own | {"NODE_RANK": str(rank // 2)}, (rank, 4)) for rank, own in enumerate(environs)]
    assert found == [World(rank, 4, rank % 2, 2) for rank in range(4)]


def test_the_step_of_a_daemon_does_not_count_the_ranks_of_a_host() -> None:
    """Four daemons, and ranks on two of their nodes."""
    first = worlds(mpiexec_in_slurm, (*UNEQUAL, 0, 0))[0]
    assert first == World(0, 4, 0, 3)


@pytest.mark.parametrize("launcher", IN_SLURM)
def test_the_step_of_a_daemon_or_a_shell_is_no_contradiction(launcher: Any) -> None:
    for own in launcher(EQUAL):
        assert find_contradiction({name: str(value) for name, value in own.items()}) is None


def test_there_may_be_more_daemons_than_ranks() -> None:
    assert worlds(mpirun_in_slurm, (1, 1, 0, 0)) == [World(0, 2, 0, 1), World(1, 2, 0, 1)]


@pytest.mark.parametrize("launcher", KNOWING)
def test_unequal_nodes(launcher: Any) -> None:
    found = worlds(launcher, UNEQUAL)
    assert found == [World(rank, 4, local, UNEQUAL[node], UNEQUAL) for rank, node, local in places(UNEQUAL)]
    assert [world.node_share for world in found] == [0.75, 0.75, 0.75, 0.25]
    assert {(world.num_nodes, world.num_streams, world.host_by_host) for world in found} == {(2, 4, True)}


@pytest.mark.parametrize("launcher", [open_mpi, mpich])
def test_unequal_nodes_that_other_ranks_cannot_know(launcher: Any) -> None:
    first = worlds(launcher, UNEQUAL)[0]
    with pytest.raises(ConfigError, match=r"host of rank 0 has 3 of 4 ranks.*node_sizes="):
        first.num_streams  # noqa: B018


@pytest.mark.parametrize("sizes", [(4, 2, 2), (2, 2, 4, 1), (3, 2, 2)])
@pytest.mark.parametrize("launcher", [torchrun, deepspeed])
def test_ranks_of_three_unequal_nodes_agree(launcher: Any, sizes: tuple[int, ...]) -> None:
    assert len({world.num_streams for world in worlds(launcher, sizes)}) == 1


@pytest.mark.parametrize(
    ("text", "sizes"), [("4(x2),3", (4, 4, 3)), ("1,2(x2),1", (1, 2, 2, 1)), ("3", None), ("2(x3)", None)]
)
def test_tasks_per_node_of_slurm(text: str, sizes: tuple[int, ...] | None) -> None:
    total = 3 if text == "3" else 6 if sizes is None else sum(sizes)
    environ = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": str(total), "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    world = read_environment({**environ, "SLURM_STEP_TASKS_PER_NODE": text})
    assert world.node_sizes == sizes
    assert world.local_world_size == int(text[0])


def test_the_tasks_of_slurm_in_another_order_each_read_a_stream_of_their_own() -> None:
    environ = {**srun((2, 2))[1], "SLURM_DISTRIBUTION": "cyclic:block", "SLURM_NODEID": 1, "SLURM_LOCALID": 0}
    world = read_environment({name: str(value) for name, value in environ.items()})
    assert world == World(1, 4, 0, 2, (1, 1, 1, 1), host_ranks=(1, 3))
    assert world.node_share == 0.5


@pytest.mark.parametrize("distribution", ["cyclic", "plane=1", "arbitrary"])
def test_a_node_reads_the_streams_of_all_its_tasks(distribution: str) -> None:
    found = []
    for rank, own in enumerate(srun(EQUAL)):
        environ = {**own, "SLURM_DISTRIBUTION": distribution, "SLURM_NODEID": rank % 4, "SLURM_LOCALID": rank // 4}
        found.append(read_environment({name: str(value) for name, value in environ.items()}).node_share)
    assert found == [0.25] * 8


def test_a_node_of_more_ranks_reads_the_streams_of_several() -> None:
    assert [world.node_share for world in worlds(torchrun, (4, 1, 1))] == [4 / 6] * 4 + [2 / 6] * 2


def test_open_mpi_does_not_say_the_node_of_a_rank() -> None:
    environs = [{**own, "OMPI_MCA_orte_num_nodes": 2} for own in open_mpi(UNEQUAL)]
    found = worlds(lambda _: environs, UNEQUAL)
    assert {world.node_sizes for world in found} == {(1, 1, 1, 1)}
    assert [world.node_share for world in found] == [0.75, 0.75, 0.75, 0.25]


ACROSS = [World(rank, 16, rank // 4, 4) for rank in range(16)]  # rank = local_rank * nodes + node


def test_ranks_across_nodes_agree_on_the_share_of_a_node() -> None:
    """Not all of them can tell, and one rank must not refuse a cache that the others accept."""
    assert [world.rank for world in ACROSS if world.host_by_host] == [0, 5, 10, 15]
    assert {world.node_share for world in ACROSS} == {0.25}


def test_the_ranks_of_a_host_can_be_given() -> None:
    found = [World(rank, 8, rank // 4, 2, host_ranks=(rank % 4, rank % 4 + 4)) for rank in range(8)]
    assert {world.node_share for world in found} == {0.5}
    for ranks_here in ((1,), (0, 8)):
        with pytest.raises(ConfigError, match=r"host_ranks=.* must have rank 0 and only ranks of a world of 8"):
            World(0, 8, 0, 2, host_ranks=ranks_here)


def test_a_sampler_of_one_stream_works_on_nodes_of_unknown_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in mpich(UNEQUAL)[0].items():
        monkeypatch.setenv(name, str(value))
    assert ShardedSampler([8] * 8).num_nodes == 1
    with pytest.raises(ConfigError, match="pass num_streams=1"):
        ShardedSampler([8] * 8, num_streams=4)


class FourRanks(DeviceMesh):
    """The mesh of rank 0 of four data-parallel ranks, without their process group."""

    mesh_dim_names, shape, mesh = ("dp",), (4,), torch.arange(4)

    def __init__(self) -> None:
        pass

    def size(self, mesh_dim: int | None = None) -> int:
        return 4

    def get_coordinate(self) -> tuple[int, ...]:
        return (0,)


def test_a_loader_of_one_stream_works_on_a_mesh_of_nodes_of_unknown_sizes(
    dataset_of: Any, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in mpich(UNEQUAL)[0].items():
        monkeypatch.setenv(name, str(value))
    dataset = make_dataset(dataset_of([[8, 8]]), storage_options=bucket.options, cache=False)
    loader = make_loader(dataset, 2, mesh=FourRanks(), num_streams=1)
    assert (loader.sampler.rank, loader.sampler.num_replicas) == (0, 4)
    with pytest.raises(ConfigError, match="pass num_streams=1 if all ranks are data-parallel"):
        make_loader(dataset, 2, mesh=FourRanks())


@pytest.mark.parametrize(
    ("address", "nodes"), [("127.0.0.1", 1), ("localhost", 1), ("10.1.2.3", None), ("node7", None)]
)
def test_ranks_that_meet_at_a_loopback_address_are_on_one_host(address: str, nodes: int | None) -> None:
    lightning = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0", "MASTER_ADDR": address}
    assert read_environment(lightning).num_nodes == nodes


def test_a_sampler_takes_the_streams_of_unequal_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in srun(UNEQUAL)[3].items():
        monkeypatch.setenv(name, str(value))
    assert ShardedSampler([8] * 8, num_streams=4).node_share == 0.25


@pytest.mark.parametrize("sizes", [(1, 1), (2,), (2, 0, 2), ()])
def test_node_sizes_that_do_not_add_up(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="do not add up to a world of 4: give the number of ranks on each node"):
        World(0, 4, 0, 2, sizes)


def test_unknown_nodes_warn_once(dataset_of: Any, bucket: Any, caplog: pytest.LogCaptureFixture) -> None:
    dataset = make_dataset(dataset_of([[8, 8]]), storage_options=bucket.options, cache=False)
    ranks._warn_of_unknown_nodes.cache_clear()
    with caplog.at_level(logging.WARNING, ranks.log.name):
        for world in (World(), World(0, 2, 0, 2), World(1, 2), World(0, 2), World(0, 2)):
            make_loader(dataset, 2, world=world)
    (record,) = caplog.records
    assert record.message.startswith("the launcher does not say how many nodes the 2 ranks are on, so every node will")
    assert "fetch and cache the whole dataset: start with torchrun or srun, set LOCAL_WORLD_SIZE" in record.message


def test_ranks_across_nodes_warn_once_a_host(dataset_of: Any, bucket: Any, caplog: pytest.LogCaptureFixture) -> None:
    dataset = make_dataset(dataset_of([[8, 8]]), storage_options=bucket.options, cache=False)
    ranks._warn_of_scattered_ranks.cache_clear()
    with caplog.at_level(logging.WARNING, ranks.log.name):
        for world in (*ACROSS, *ACROSS, World(5, 8, 0, 8), *(World(rank, 8, rank % 4, 4) for rank in range(8))):
            make_loader(dataset, 1, world=world)
    assert [record.args for record in caplog.records] == [(1, 4), (2, 4), (3, 4)]
    assert "mpirun --map-by slot" in caplog.text


def test_meshes_are_searched_for_once_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.gc, "get_referrers", lambda _: pytest.fail("searched without a process group"))
    for name, value in torchrun((2,))[0].items():
        monkeypatch.setenv(name, str(value))
    assert ranks.world_of(None, None) == World(0, 2, 0, 2)


def test_a_rank_finishes_alone_and_starts_no_process_group(
    dataset_of: Any, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in torchrun((2,))[0].items():
        monkeypatch.setenv(name, str(value))
    loader = make_loader(dataset_of([[8, 8]]), 3, storage_options=bucket.options, cache=False)
    assert loader.sampler.num_replicas == 2
    for _ in range(2):
        assert [len(batch["row_id"]) for batch in loader] == [3, 3, 2]
    loader.load_state_dict(loader.state_dict())
    assert not torch.distributed.is_initialized()


# The bytes of a cluster, counted at the origin.


def clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "LOCAL_", "GROUP_", "CROSS_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.mark.variants
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL])
def test_the_same_streams_and_bytes_under_each_launcher(
    dataset_of: Any, bucket: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(parquet, "SHARED_BYTES", 0)  # row groups as small as these would share requests
    monkeypatch.setattr(capacity, "AHEAD_BYTES", 1)
    url = dataset_of([[ROWS] * 8] * (GROUPS // 8))
    total = sum(group.bytes for group in make_dataset(url, storage_options=bucket.options, cache=False).row_groups)
    found = {}
    for launcher in KNOWING[:3]:
        rows, streams, fetched = [], [], 0
        for (_, node, _), environ in zip(places(sizes), launcher(sizes), strict=True):
            clear(monkeypatch)
            for name, value in environ.items():
                monkeypatch.setenv(name, str(value))
            cache = CacheConfig(cache_dir=str(tmp_path / launcher.__name__ / str(node)), cache_bytes="100MB")
            dataset = make_dataset(url, storage_options=bucket.options, cache=cache)
            footers = bucket.server.stats()["get_bytes"]
            loader = make_loader(dataset, 10)
            streams.append((loader.sampler.order.num_streams, loader.sampler.num_nodes, loader.sampler.rank))
            rows.append([row for batch in loader for row in batch["row_id"].tolist()])
            fetched += bucket.server.stats()["get_bytes"] - footers
            assert loader.sampler.node_share == sizes[node] / sum(sizes)
        assert Counter(chain(*rows)) == Counter(range(GROUPS * ROWS))
        found[launcher.__name__] = streams, rows, fetched
        print(f"{launcher.__name__} {sizes}: {fetched:,} bytes of row groups; the dataset has {total:,}")
    assert found["torchrun"] == found["srun"] == found["deepspeed"]
    assert found["srun"][2] == total
