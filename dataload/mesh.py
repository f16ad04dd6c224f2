"""The geometry of a torch DeviceMesh: its data-parallel dimensions, and which of their ranks share nodes.

A mesh arranges all ranks in dimensions, such as data-parallel × tensor-parallel. torch is not imported.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The usual names of dimensions along which ranks need equal batches: tensor, context, sequence and pipeline parallel.
MODEL_PARALLEL = {"tp", "cp", "sp", "pp", "mp", "ulysses", "ring"} | {
    f"{kind}{suffix}"
    for kind in ("tensor", "context", "sequence", "pipeline", "model", "tensor_model", "pipeline_model")
    for suffix in ("", "_parallel")
}


def model_parallel_dims(mesh: DeviceMesh) -> list[str]:
    """Return the names of the dimensions of `mesh` along which ranks need equal batches."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return [name for name, size in sizes.items() if name in MODEL_PARALLEL and size > 1]


def data_parallel_argument(mesh: DeviceMesh, name: str = "mesh") -> str:
    """Return the argument of `make_loader` for the data-parallel dimensions of a mesh that the program calls `name`."""
    dims = [f'"{dim}"' for dim in mesh.mesh_dim_names or () if dim not in MODEL_PARALLEL]
    return f"mesh={name}[{', '.join(dims)}]" if dims else "world=World()"


def ravel(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of a coordinate, counted row by row."""
    number = 0
    for index, size in zip(coordinate, shape, strict=True):
        number = number * size + index
    return number


def data_parallel_ranks(mesh: DeviceMesh, num_ranks: int) -> list[int] | None:
    """Return the data-parallel rank of each of `num_ranks` ranks. On a regular grid all ranks return the same.

    The strides of the data-parallel dimensions determine the other dimensions of the whole mesh.

    Args:
        mesh: The data-parallel dimensions of a mesh of all ranks.
        num_ranks: Ranks of the whole mesh.

    Returns:
        None if this part of the mesh is not one of a regular grid, so that it does not determine the other ranks.
    """
    shape, own = tuple(mesh.shape), mesh.mesh.flatten().tolist()
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    strides = [own[step] - own[0] if size > 1 else 1 for step, size in zip(steps, shape, strict=True)]

    def number(rank: int) -> int:
        return ravel([rank // stride % size for stride, size in zip(strides, shape, strict=True)], shape)

    if min(strides) < 1 or list(map(number, own)) != list(range(len(own))):
        return None
    return list(map(number, range(num_ranks)))


def ranks_together(ranks: Sequence[int], node_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of the runs of data-parallel ranks that are on the same nodes.

    A data-parallel rank is on several nodes if its model-parallel peers are.

    Args:
        ranks: The data-parallel rank of each process.
        node_sizes: Processes on each node.
    """
    ends = list(accumulate(node_sizes))
    nodes: list[set[int]] = [set() for _ in range(max(ranks) + 1)]
    for process, rank in enumerate(ranks):
        nodes[rank].add(bisect_right(ends, process))
    return tuple(len(list(run)) for _, run in groupby(nodes))
