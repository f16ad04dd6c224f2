"""`make_loader`: check its arguments, open the dataset, build the sampler and the loader."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Subset

from dataload.arguments import known_keywords, local_folder
from dataload.cache.config import CacheConfig, split_options
from dataload.catalog.sources import Source
from dataload.errors import ConfigError, DataError
from dataload.loader.arguments import LoaderOptions, check_arguments
from dataload.loader.batch_maker import BatchMaker
from dataload.loader.integrations import TrainerEpochs
from dataload.loader.loader import BATCHES_AHEAD, STALL_SECONDS, Loader
from dataload.loader.loader_metrics import metrics_of
from dataload.loader.other_datasets import dataset_of
from dataload.loader.ranks import ranks_of_host, share_host, world_of
from dataload.loader.run_record import given_of
from dataload.loader.samplers import DatasetSampler, MixedSampler
from dataload.map_style import MapStyle
from dataload.mixture import Mixture
from dataload.row_lengths import RowLengths, budget_of
from dataload.rows.known_nulls import IN_PYTHON
from dataload.rows.numbered_rows import ROW_IDS
from dataload.samplers.order import Shuffle
from dataload.samplers.token_batches import TokenBudget
from dataload.world import World

if TYPE_CHECKING:
    from dataload.catalog.filters import Filters
    from dataload.formats.hive_partitions import Partitioning
    from dataload.formats.text import TextErrors

log = logging.getLogger(__name__)

MUCH_PADDING = 0.1  # of the places in packed sequences, from which on a loader warns


@known_keywords(CacheConfig, others=True)
def make_loader(
    source: Source | MapStyle | Subset[Any],
    batch_size: int | None = None,
    *,
    batch_tokens: int | None = None,
    length: str | None = None,
    pad_to_multiple: int | None = None,
    shuffle: Shuffle | bool = True,
    seed: int = 0,
    drop_last: bool = False,
    window: int | None = None,
    num_streams: int | None = None,
    num_workers: int = 0,
    num_threads: int | None = None,
    group: Mapping[str, Sequence[str]] | None = None,
    ragged: str = "list",
    transform: Callable[..., Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
    pin_memory: bool | None = None,
    prefetch: int | None = None,
    row_ids: bool = False,
    on_error: str = "raise",
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    storage_options: dict[str, Any] | None = None,
    cache: CacheConfig | Literal[False] | None = None,
    fill_null: Any = None,
    null_masks: bool = False,
    errors: TextErrors = "raise",
    partitioning: Partitioning = "hive",
    stats_dir: str | os.PathLike[str] | None = None,
    metrics_port: int | None = None,
    stall_warning: float = STALL_SECONDS,
    world: World | None = None,
    mesh: DeviceMesh | None = None,
    **dataloader_kwargs: Unpack[LoaderOptions],
) -> Loader:
    """Return a loader of this rank's batches. Over all ranks, an epoch has each row exactly once.

    Args:
        source: A dataset, a mixture of datasets (`dataload.mix`), or a source as `make_dataset` takes it. Also a torch
            `Subset` of a dataset, whose rows come in file order without a shuffle, and a `Dataset` of Hugging Face that
            has Arrow files.
        batch_size: Rows per batch on this rank.
        batch_tokens: Instead of `batch_size`, most tokens of a batch: its rows times the longest of them. Rows of
            similar length come together, and all ranks have equally many batches.
        length: With `batch_tokens`, the column that holds the length of each row, or a column of lists, whose lengths
            count. The first loader on a host reads it once, for all rows.
        pad_to_multiple: With `batch_tokens`, return each column of lists of numbers as one Tensor[B, longest], padded
            with zeros up to a multiple of this number (1: to the longest), and "<column>.length", int64 Tensor[B]. The
            budget counts the padding. A list that is longer than `length` says is a DataError.
        shuffle: True or "block" shuffles row groups over the whole dataset, and rows inside consecutive windows of row
            groups. A batch mixes the row groups of one window only. "full" shuffles all rows, for rows that are sorted
            or partitioned by label; the cache must hold all of them. False keeps file order.
        seed: Seed of the order, together with the epoch and the dataset.
        drop_last: Drop the last global batch of an epoch if it is incomplete.
        window: Row groups in a window, of each source of a mixture. The first windows of an epoch have 1, 2, 4, … row
            groups, so its first batches have rows of one. None: `default_window` of their rows and bytes.
        num_streams: Parts of the dataset, of which each node reads its own. None: one for each node.
        num_workers: Processes that run `transform` and `collate_fn`. With 0, or with neither of them, threads of this
            process make the batches. Without a cache, each worker fetches and decodes every row group.
        num_threads: Threads that run `transform` and `collate_fn`, each for another batch, without `num_workers`. It
            pays if they release the interpreter lock, as most image decoders do. The functions must be thread-safe.
            None: one thread for each loop. A function of several loaders, or a tokenizer that their functions share,
            may run in several threads then, too. 0: the thread of the loop runs them, when it needs a batch.
        group: Name -> columns of one dtype that are returned together as one Tensor[B, k].
        ragged: "list", or "flat" for values and offsets (`dataload.rows.collate.Flat`), nested where the lists are.
        transform: Called as transform(batch), or as transform(batch, rng) with a numpy Generator if it has a parameter
            `rng`, or a second positional parameter without a default. The signature of a torch Module is that of its
            `forward`. The same batch always gets the same generator, with any number of workers or threads and after a
            resume. What torch's functions of random tensors draw is the same for it, too, and moves no generator of the
            loop. Other draws of torch, such as dropout and torch.manual_seed, and NumPy's and Python's global
            generators are shared with the loop in threads: a warning says so if the first batch needs them.
        collate_fn: Makes the batch from a list of row dicts (see `Dataset.__getitems__`), whose `.columns` is the
            default batch: a collator of transformers or TRL as it is. One of timm gets the values of each row, so
            choose columns=["image", "label"].
        device: Device of the batches: of their tensors, and of other objects with a method `to`.
        pin_memory: Pin batches. None: pin them if the device, or the device of accelerate, is CUDA.
        prefetch: Batches that each worker, or all threads together, prepare ahead: at least 2, and one per thread.
        row_ids: Add the column "row_id": the number of each row in `loader.dataset`, int64 Tensor[B], whose `locate`
            returns its file and row group. A Subset or a dataset of Hugging Face numbers its own rows otherwise.
        on_error: "raise" raises an exception of `transform` or `collate_fn`, or of a value that cannot be decoded, with
            a note that names the rows of the batch; and the error of a function of `map`. "skip" replaces the rows
            that raise by other rows of their batch, always the same ones, and counts them in `stats()`: `skipped_rows`,
            `skipped_row_ids`. It may call the functions several times for such a batch, with parts of its rows and the
            same `rng`. Exceptions that no row causes, such as `torch.OutOfMemoryError`, are raised.
        columns: As in `make_dataset`.
        filters: As in `make_dataset`.
        storage_options: As in `make_dataset`.
        cache: As in `make_dataset`.
        fill_null: As in `make_dataset`.
        null_masks: As in `make_dataset`.
        errors: As in `make_dataset`.
        partitioning: As in `make_dataset`.
        stats_dir: Folder to which each process writes its statistics once a second, for `dataload report`. Each loader
            needs its own folder. Write errors are logged, not raised.
        metrics_port: Serve these statistics to Prometheus, on this port plus the local rank, on all interfaces, until
            the process ends. The loaders of a process share the port. It needs `dataload[metrics]`.
        stall_warning: Seconds of waiting for one batch after which a line in the log names the rank, and what it waits
            for: the cause, the file, the requests in flight, and another process that makes the rows. `math.inf`: none.
        world: This rank and the number of data-parallel ranks. None: `World.detect()`.
        mesh: Instead of `world`, a torch DeviceMesh of the data-parallel dimensions only; see `World.from_mesh`. Ranks
            with equal coordinates get equal batches.
        **dataloader_kwargs: Arguments of `CacheConfig`, as in `make_dataset`. Others are passed on to
            `torch.utils.data.DataLoader`; `timeout` also holds for batches of threads.

    Raises:
        ConfigError: An argument is invalid, the cache is too small for the shuffle window, or ranks that need equal
            batches would get different ones (pass `mesh`).
        OriginError: The source cannot be read.
        DataError: A file or a column type is not supported, a column is known to have nulls that batches cannot hold,
            or a function of `map` is known to fail.

    Example:
        ```python
        loader = make_loader("s3://bucket/train", batch_size=256, device="cuda")
        for epoch in range(3):
            loader.set_epoch(epoch)
            for batch in loader:
                train_step(batch["image"], batch["label"])
        ```
    """
    cache_options, for_torch = split_options(dataloader_kwargs)
    check_arguments(locals())
    here = world_of(world, mesh)
    options = {"columns": columns, "filters": filters, "storage_options": storage_options, "fill_null": fill_null}
    options |= {"null_masks": null_masks or None, "cache": cache, **cache_options}
    given = {name: value for name, value in options.items() if value is not None}
    others = {"errors": (errors, "raise"), "partitioning": (partitioning, "hive")}
    given |= {name: value for name, (value, usual) in others.items() if value != usual}
    dataset = dataset_of(source, given, shuffled=bool(shuffle))
    _check_nulls(dataset)
    if on_error == "skip":
        dataset = dataset.as_skipping()
    elif dataset.known_failure is not None:
        raise DataError(dataset.known_failure)
    _warn_of_padding(dataset, here)
    padding = None if collate_fn is not None else pad_to_multiple  # A function gets the lists as they are.
    lengths = None if batch_tokens is None else RowLengths(dataset.datasets, cast("str", length))
    shape = _shape(dataset, ragged, group, row_ids=row_ids)
    if padding is not None:
        shape |= {"pad_to_multiple": padding, "lengths": lengths}
    maker = BatchMaker(dataset, shape, collate_fn, transform, on_error)
    share_host(maker, dataset, ranks_of_host(here), num_workers)
    order: dict[str, Any] = {"window": window, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    sampler_of = None
    if batch_tokens is None or lengths is None:
        batch_size = operator.index(cast("int", batch_size))  # torch takes no other types
        how = {"world": here, "batch_size": batch_size, "num_streams": num_streams, **order}
        sampler, sampler_of = _sampler(dataset, **how), partial(_sampler_of_newer, how)
    else:
        if isinstance(dataset, Mixture) and dataset.order["batching"] == "homogeneous":
            raise ConfigError('batch_tokens and batching="homogeneous" both say what a batch has: use one of them')
        budget = budget_of(lengths, batch_tokens, pad_to_multiple or 1)
        weights = dataset.weights if isinstance(dataset, Mixture) else None
        batch_size = max(1, int(batch_tokens / max(1.0, budget.mean_of(weights))))  # about
        sampler = _sampler(dataset, here, batch_size, 1, budget=budget, **order)
    if sampler.num_rows and sampler.finished_at(0):
        size, least = f" of {sampler.global_batch_size}", f"batch_size={batch_size}"
        if batch_tokens is not None:
            size, least = "", f"batch_tokens={batch_tokens}"
        raise ConfigError(
            f"drop_last=True drops all {sampler.num_rows} rows, which are less than a global batch{size}: lower "
            f"{least}, or leave out drop_last"
        )
    return Loader(
        dataset,
        maker=maker,
        rank_sampler=sampler,
        sampler_of=sampler_of,
        batch_size=batch_size,
        drop_last=drop_last,
        device=None if device is None else torch.device(device),
        prefetch=prefetch or BATCHES_AHEAD,
        num_threads=num_threads,
        detected=world is None and mesh is None,
        local_world_size=ranks_of_host(here),
        mesh=mesh,
        stats_dir=None if stats_dir is None else local_folder("stats_dir", stats_dir),
        stall_warning=stall_warning,
        metrics=metrics_of(dataset, here, metrics_port),
        given=given_of(
            transform,
            collate_fn,
            batch_tokens=batch_tokens,
            length=length,
            pad_to_multiple=pad_to_multiple,
            group=group,
            ragged=ragged,
            row_ids=row_ids,
            on_error=on_error,
        ),
        pin_memory=pin_memory,
        **_with_workers(for_torch, num_workers, prefetch),
    )


def _warn_of_padding(dataset: MapStyle, here: World) -> None:
    """Warn if packed sequences have much padding, which small row groups leave."""
    worst = max(dataset.datasets, key=lambda each: each.padding_share)
    if here.rank or worst.packing is None or worst.padding_share < MUCH_PADDING:
        return
    log.warning(
        "%.0f%% of the packed sequences is padding: documents share sequences within their row group, which has %.1f "
        "of them on average. Write larger row groups%s",
        100 * worst.padding_share,
        np.mean(worst.block_lengths[worst.block_lengths > 0]),
        "" if worst.packing.split else ", cut documents with split=True, or pack longer sequences",
    )


def _check_nulls(dataset: MapStyle) -> None:
    for nulls in (each.known_nulls for each in dataset.datasets):
        if nulls is not None:
            raise DataError(f"{nulls}: {IN_PYTHON}")


def _sampler_of_newer(how: Mapping[str, Any], dataset: MapStyle, former: MapStyle) -> TrainerEpochs:
    """Return the sampler of another snapshot of a loader's dataset. former: the one that it has read."""
    _check_nulls(dataset)
    if isinstance(dataset, Mixture) and isinstance(former, Mixture):
        dataset.follow(former)
    return _sampler(dataset, **how)


def _sampler(
    dataset: MapStyle,
    world: World,
    batch_size: int,
    num_streams: int | None,
    *,
    window: int | None,
    budget: TokenBudget | None = None,
    **order: Any,
) -> DatasetSampler | MixedSampler:
    nodes = 1 if num_streams == 1 else world.num_streams
    streams = num_streams or nodes
    log.info("rank %d of %d: %d rows, num_streams=%d", world.rank, world.world_size, len(dataset), streams)
    order |= {"batch_size": batch_size, "num_streams": streams, "num_nodes": nodes, "node_share": world.node_share}
    windows = [each.window if window is None else window for each in dataset.datasets]
    ranks = world.world_size, world.rank
    if budget is not None and world.num_streams > 1 and world.rank == 0:
        log.warning(
            "batch_tokens cuts batches from all rows of a window, so each of the %d nodes reads the whole dataset",
            world.num_streams,
        )
    if isinstance(dataset, Mixture):
        return MixedSampler(dataset, *ranks, windows=windows, budget=budget, **order)
    [only], [width] = dataset.datasets, windows
    key = only.order_key.encode()
    return DatasetSampler(only.block_lengths, *ranks, window=width, dataset_key=key, budget=budget, **order)


def _with_workers(dataloader_kwargs: dict[str, Any], num_workers: int, prefetch: int | None) -> dict[str, Any]:
    """Return the arguments of torch's DataLoader."""
    factor = {"prefetch_factor": prefetch} if num_workers and prefetch is not None else {}
    return {**dataloader_kwargs, **factor, "num_workers": num_workers}


def _shape(dataset: MapStyle, ragged: str, group: Any, *, row_ids: bool) -> dict[str, Any]:
    """Return the arguments of `NumberedRows`. Batches may have computed columns, see `MapStyle.computed`."""
    added = ROW_IDS if row_ids else {}
    if taken := dataset.computed.keys() & added.keys():
        raise ConfigError(
            f"row_ids=True and name_column both add the column {min(taken)!r}: choose another name_column"
        )
    return {"ragged": ragged, "group": group, "computed": {**dataset.computed, **added}}
