"""A torch DistributedSampler whose order is a formula and whose position is a number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from dataload.samplers.order import Order, Shuffle
from dataload.samplers.rank_sampler import RankSampler
from dataload.samplers.token_batches import TokenBudget


class ShardedSampler(RankSampler):
    """A sampler that shards each epoch over the ranks: each row exactly once, in an order independent of the world.

    11 positions of an epoch, in global batches of 4, on 2 ranks with a batch_size of 2 (* is padding):

        position                 0 1 2 3    4 5 6 7    8 9 10
        num_streams=1   rank 0   0 1        4 5        8 9
                        rank 1       2 3        6 7      10 0*
        drop_last=True  rank 0   0 1        4 5
                        rank 1       2 3        6 7
        num_streams=2   rank 0   0   2      4   6      8   10         node 0 owns stream 0, the even positions
        num_nodes=2     rank 1     1   3      5   7      9    0*      node 1 owns stream 1

    `Order` maps positions to rows; it depends on the dataset, seed, epoch, shuffle, window and num_streams. So the t-th
    global batch has the same rows in every world with that global batch size. An epoch that begins in one world can
    finish in another.

    Streams are local to nodes if num_nodes divides num_streams, num_streams divides the global batch, and ranks are
    numbered node by node. Each node then reads the same row groups in every epoch, and no others.

    Args:
        block_lengths: Rows of each row group, in file order; see `Order`.
        num_replicas: Number of ranks; None: `World.detect()`.
        rank: Number of this rank; None: `World.detect()`.
        shuffle: "block" (or True), "full" or False; see `Order`.
        seed: Seed of the shuffle.
        drop_last: Drop the last, partial global batch instead of padding it by at most num_replicas - 1 rows.
        window: Row groups shuffled together; see `Order`.
        batch_size: Rows of one batch of one rank.
        num_streams: Number of shards that each global batch draws on equally; see `Order`.
        num_nodes: Number of equal groups of consecutive ranks that share a host, such as hosts; None: that of the
            detected world if `num_replicas` or `rank` is None and it is known, else 1.
        node_share: Part of the rows that this rank's host reads, if it has several groups. None: detected, too.
        budget: What batches are cut by, instead of `batch_size`, which is then their expected size.
        dataset_key: Identifies the dataset; see `Order`.

    Attributes:
        order: The `Order` of the dataset.
        epoch: The current epoch.
        cursor: Global rows of the current epoch that are consumed.
        num_samples: Rows of each rank in a full epoch, as in torch. `total_size` is that of all ranks.

    Raises:
        ConfigError: An argument cannot work, or several streams on several nodes cannot be local.

    Example:
        >>> from dataload.samplers import ShardedSampler
        >>> for rank in range(2):
        ...     sampler = ShardedSampler([6, 5], num_replicas=2, rank=rank, batch_size=2, shuffle=False)
        ...     print(rank, list(sampler))
        0 [0, 1, 4, 5, 8, 9]
        1 [2, 3, 6, 7, 10, 0]
        >>> sampler = ShardedSampler([6, 5], num_replicas=2, rank=0, batch_size=2, shuffle=False)
        >>> sampler.advance()  # one global batch is consumed
        >>> state = sampler.state_dict()
        >>> resumed = ShardedSampler([6, 5], num_replicas=1, rank=0, batch_size=4, shuffle=False)
        >>> resumed.load_state_dict(state)
        >>> list(resumed)
        [4, 5, 6, 7, 8, 9, 10]

    Notes: iteration does not move the cursor. The consumer of the batches does, by `advance` or `seek`, so that rows
    that are only prefetched do not count. When an iteration ends, the sampler moves to the next epoch; batches of the
    old one that are consumed later are marked in the old one.
    torchdata's StatefulDataLoader also saves the iterator, which counts the rows that it has yielded.
    """

    order: Order

    def __init__(
        self,
        block_lengths: Sequence[int] | npt.ArrayLike,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        shuffle: Shuffle | bool = "block",
        seed: int = 0,
        drop_last: bool = False,
        window: int | None = None,
        batch_size: int = 1,
        num_streams: int = 1,
        num_nodes: int | None = None,
        node_share: float | None = None,
        budget: TokenBudget | None = None,
        dataset_key: bytes = b"",
    ) -> None:
        order = Order(
            block_lengths, shuffle=shuffle, seed=seed, window=window, num_streams=num_streams, dataset_key=dataset_key
        )
        super().__init__(
            order,
            num_replicas,
            rank,
            drop_last=drop_last,
            batch_size=batch_size,
            num_nodes=num_nodes,
            node_share=node_share,
            budget=budget,
        )
