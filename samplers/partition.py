"""Pure functions that split rows over streams, streams over nodes, and global batches over ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError

Int64 = npt.NDArray[np.int64]


def even_split(total: int, parts: int) -> Int64:
    """Return the borders of `parts` parts of 0..total: int64 [parts + 1]. Part i has ceil((total - i) / parts)."""
    numbers: Int64 = np.arange(parts + 1)
    return numbers * (total // parts) + np.minimum(numbers, total % parts)


def stream_owners(num_streams: int, num_nodes: int) -> Int64:
    """Return the node that owns each stream: int64 [num_streams].

    A node that joins takes only the streams that exceed the even share of the others. All other streams keep their
    owner, so caches stay useful when nodes join or leave. Shares differ by at most one. If there are more nodes than
    streams, the last nodes own none.
    """
    owned = [list(range(num_streams))]
    for num_owners in range(2, min(num_nodes, num_streams) + 1):
        shares = np.diff(even_split(num_streams, num_owners)).tolist()
        surplus = (stream for streams, share in zip(owned, shares, strict=False) for stream in streams[share:])
        owned.append(sorted(surplus))
        owned = [streams[:share] for streams, share in zip(owned, shares, strict=True)]
    owners = np.empty(num_streams, np.int64)
    for node, streams in enumerate(owned):
        owners[streams] = node
    return owners


def batch_slice(start: int, size: int, streams: Int64, low: int, high: int) -> Int64:
    """Return the positions of one rank in one global batch: int64 [high - low].

    The global batch is the positions [start, start + size), sorted by stream in the order of `streams`, then by
    position. The rank takes numbers low..high (exclusive) of it. Nothing is actually sorted, because each stream has
    every len(streams)-th position.
    """
    firsts = start + (streams - start) % len(streams)
    counts = (start + size - firsts + len(streams) - 1) // len(streams)
    ends = np.cumsum(counts)
    numbers: Int64 = np.arange(low, high)
    indices = np.searchsorted(ends, numbers, "right")
    positions: Int64 = firsts[indices] + len(streams) * (numbers - (ends - counts)[indices])
    return positions


def is_local(num_streams: int, num_nodes: int, num_replicas: int, batch_size: int) -> bool:
    """Return whether each full global batch takes exactly as many rows of a node's own streams as its ranks need."""
    return (
        num_replicas % num_nodes == 0 and num_streams % num_nodes == 0 and num_replicas * batch_size % num_streams == 0
    )


def check_locality(num_streams: int, num_nodes: int, num_replicas: int, batch_size: int) -> None:
    """Raise ConfigError, naming the nearest number that works, if streams cannot be local to nodes."""
    if is_local(num_streams, num_nodes, num_replicas, batch_size):
        return
    if num_replicas % num_nodes:
        nearest = min(_divisors(num_replicas), key=lambda nodes: abs(nodes - num_nodes))
        raise ConfigError(
            f"num_nodes={num_nodes} do not hold equal parts of num_replicas={num_replicas}: "
            f"use num_nodes={nearest}, the nearest number that does, or give up locality with num_streams=1"
        )
    global_batch = num_replicas * batch_size
    nearest = num_nodes * min(_divisors(global_batch // num_nodes), key=lambda k: abs(k * num_nodes - num_streams))
    raise ConfigError(
        f"num_streams={num_streams} cannot be local on num_nodes={num_nodes} with a global batch of {global_batch}: "
        f"it must be a multiple of {num_nodes} that divides {global_batch}; the nearest is num_streams={nearest}"
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
