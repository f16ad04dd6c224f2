"""`fit`: DDP, autocast, GradScaler, checkpoints and the profiler of torch, put together in the right order."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dataload.arguments import is_url, known_keywords, local_folder, whole_number
from dataload.errors import ConfigError
from dataload.loader.changes import OnChange, check_choice
from dataload.loader.loader import Loader
from dataload.map_style import MapStyle
from dataload.mixture import Mixture
from dataload.train.batch_weights import LossWeight, check_loss_weight, weight_of
from dataload.train.checkpoint.checkpoints import Checkpoints
from dataload.train.ending import STOP_SIGNALS, Ending, StopSignal
from dataload.train.loop import TrainingLoop
from dataload.train.loss_monitor import LossMonitor, OnSpike, Spikes
from dataload.train.modules import ModuleSelector, begin_training, check_not_wrapped, recomputed
from dataload.train.optimizer_step import LossFn, OptimizerStep, check_options
from dataload.train.profiling import traced
from dataload.train.ranks.collectives import agree, gather, is_first, on_all, on_first
from dataload.train.ranks.exchange import exchange_between
from dataload.train.ranks.process_group import check_ranks_run, device_of, process_group
from dataload.train.ranks.replica import COMM_HOOKS
from dataload.train.ranks.sharded import check_overflows_are_shared, move
from dataload.train.tensorboard import TensorBoardWriter
from dataload.world import World

log = logging.getLogger(__name__)


@known_keywords()
def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    loss_fn: LossFn,
    *,
    epochs: int,
    precision: str = "auto",
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    scheduler: Any = None,
    activation_checkpointing: ModuleSelector | None = None,
    comm_hook: str | None = None,
    static_graph: bool = False,
    compile: bool | Mapping[str, Any] = False,  # noqa: A002
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
    resume: str | os.PathLike[str] | None = "auto",
    on_change: OnChange = "error",
    check_finite: bool = True,
    timeout: float | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    log_every: int = 10,
    profile: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    mesh: DeviceMesh | None = None,
    max_steps: int | None = None,
    max_seconds: float | None = None,
    stop_signals: Sequence[str] | None = STOP_SIGNALS,
    loss_weight: LossWeight | None = None,
    spike: float | None = None,
    on_spike: OnSpike = "log",
) -> list[dict[str, Any]]:
    """Train `model` in place until `epochs` epochs are done.

    Under torchrun, or with another launcher's environment, the ranks train together by DDP: on `cuda:LOCAL_RANK` over
    NCCL, or on the CPU over gloo. If there is no process group yet, `fit` starts one and destroys it at the end, also
    after an exception.

    A model that the caller has sharded by `fully_shard` (FSDP2) trains as it is, also if it is partly replicated (HSDP)
    or tensor-parallel. Give its loader the mesh of the data-parallel dimensions: `make_loader(..., mesh=mesh)`. Its
    checkpoints can be resumed on another number of ranks, too.

    Args:
        model: Each module trains in the mode that it is in when `fit` is called, and returns to this mode after each
            evaluation: a BatchNorm in eval mode stays frozen. If all modules are in the same mode, as in a new model or
            after `model.eval()`, `fit` calls `model.train()`.
        optimizer: The optimizer of the model's parameters. A loss with parameters is a submodule of the model.
        loader: This rank's batches. A batch is a dict, tuple or list of columns; `fit` moves tensors to the device.
            The rows of a batch are the first dimension that most of its tensors have, apart from empty ones. Batches
            without rows are skipped. Ranks whose loaders end early take part in the last steps with no rows. Each epoch
            begins with a call of set_epoch of the loader, or of its sampler and its dataset if it has none. `fit`
            takes a batch before it trains on the previous one, so a loader must not reuse the memory of a batch for the
            next one: let it yield copies.
        loss_fn: loss_fn(model, batch) returns the mean loss over the batch's rows as a scalar tensor, or this loss and
            a dict of scalars to log. The scalars may not have the names of an epoch's own values (see Returns).
        epochs: Number of epochs in total, including those before a resume.
        precision: Autocast to "bf16" or "fp16" (with loss scaling); "fp32" for no autocast. "auto": "bf16" on
            accelerators that have it, and "fp32" elsewhere. "fp16" needs the same sharding of all parameters, which a
            tensor-parallel model in FSDP2 seldom has.
        accumulate: Batches per optimizer step. The gradient of a step is that of the mean over all rows of its batches
            (see `loss_weight`) on all ranks, also in the last step of an epoch, which may have fewer batches.
        clip_grad_norm: Upper bound of the norm of the averaged gradients; None for no clipping.
        scheduler: A learning rate scheduler. Its step() is called after every optimizer step, not after every epoch.
        activation_checkpointing: Classes of modules, or a predicate of a module. The activations of these modules are
            not stored but computed again for the gradient.
        comm_hook: Compress gradients between ranks to "bf16" or "fp16", or by "powersgd". The error feedback of
            PowerSGD is not saved and starts at zero after a resume.
        static_graph: Promise DDP the same graph in each step, so that parameters may remain without gradients. With
            `accumulate`, or three ranks or more, a resumed run may then differ in the last bits from an uninterrupted
            one.
        compile: True, or the arguments of torch.compile. If the last batch is smaller, torch compiles the model again,
            for any size, and a resumed run probably differs in the last bits from an uninterrupted one.
        evaluate: evaluate(model) returns scalars. It is called on every rank after each epoch, in eval mode, without
            gradients and in the precision of the training. See `evaluate_over`. If its loader shuffles, call
            loader.set_epoch(0) in `evaluate`: a resumed run begins again with the first order of this loader, and
            another order may change the last bits of the metrics. If `evaluate` has state_dict and load_state_dict, as
            an object with the moving average of the weights may, checkpoints have its state, which is the same on all
            ranks.
        checkpoint_dir: A folder that all ranks see, or a URL such as "s3://bucket/run", whose store is opened with the
            credentials of the environment. It gets a checkpoint at the end of each epoch, before `evaluate`.
        checkpoint_every: Optimizer steps between further checkpoints within an epoch, as long as all ranks have further
            batches. The loader needs a state_dict. Random numbers that are drawn while it makes a batch must come from
            this state.
        keep: Number of latest checkpoints of this run to keep. Checkpoints of earlier runs in the folder stay.
        resume: "auto" resumes from the latest checkpoint in `checkpoint_dir` if there is one; None starts from the
            beginning; a path must exist, and counts again after each restart by torchrun. With the same number of
            ranks, the result has the same bits as that of an uninterrupted run, unless persistent workers of the loader
            draw from the global generators while they make a batch. Checkpoints have the states of torch's generators
            on the CPU and on CUDA, and not on other accelerators. With another number of ranks, the loader states of
            all ranks must have been equal. Learning rates are those of the checkpoint. Other data, as further
            files, are trained on with a warning if the checkpoint is of the end of an epoch.
        on_change: What to do if the data has changed since a checkpoint within an epoch: "error" raises a ConfigError,
            "next_epoch" ends the epoch on the old data, "continue" goes on with what the epoch has not had of the new.
            See `Loader.load_state_dict`. The checkpoint has what "continue" must know of the old data.
        check_finite: Stop at a loss that is NaN or infinite. On a GPU this happens a few steps later, because no step
            waits for its loss. Parameters are checked before each checkpoint and at the end of each epoch.
        timeout: Seconds after which an operation that waits for another rank fails; None for torch's default. Between
            GPUs, NCCL waits, and torch then ends the process with a message of its own.
        log_dir: A folder for TensorBoard. It gets loss, rows per second, stall fraction, peak memory in bytes and
            learning rate every `log_every` optimizer steps, and each epoch's dict. A loader of `make_loader` without a
            `stats_dir` writes its stats there, too, for `dataload report`.
        log_every: Optimizer steps between two points in TensorBoard.
        profile: A folder for a trace of ten early steps of each rank, which names the stages of loop and loader. Nsight
            Systems shows these names in all steps.
        device: The device of this rank; None for this rank's GPU, or the CPU if there is none.
        progress: Whether rank 0 shows a progress bar in a terminal, and one line for each finished epoch on standard
            error. Otherwise the line goes to the log, at level INFO.
        mesh: A torch DeviceMesh of the data-parallel dimensions, over which loss and metrics are reduced. None: that of
            the loader if it has one; otherwise all ranks are data-parallel.
        max_steps: Optimizer steps in total, including those before a resume, after which the run ends within an epoch.
            None: `epochs` alone decide. If a rank has no more batches by then, the epoch ends first.
        max_seconds: Seconds from this call on, after which the run ends with the next step. Ranks may differ, as in
            `deadline - time.time()`: the first one decides. None: none.
        stop_signals: Names of signals that end the run, on whichever rank they come: all ranks finish the step and
            save, rank 0 logs why, and `fit` raises SystemExit(0), which ends the program with exit status 0, also if
            all epochs are trained. Before the ranks have met, a signal ends the process as without `fit`. Slurm's
            `--signal`, Kubernetes and spot instances send one before they kill. Those that the program handles itself
            are left to it, and all of them if `fit` does not run in the main thread.
        loss_weight: What the loss of a batch averages over, if not its rows: "tokens", or a function of the batch that
            returns a number, at least 0. Batches of all ranks and of `accumulate` are weighed by it, so that 8 batches
            of 1 row train as 1 batch of 8. "tokens" counts the values of `batch["labels"]` (a tensor, or a list of
            them) that are not -100. A model that shifts labels by itself leaves out the first of each row: then pass
            `lambda batch: (batch["labels"][:, 1:] != -100).sum()`. The number is read on the host in each step, and the
            ranks exchange it. Batches that weigh 0 train nothing: an optimizer step of only such batches is left out,
            with that of the scheduler. In a sharded model, the gradient of their loss must be 0, as that of torch's
            losses is. Resume an epoch with the same `loss_weight`: its means add up.
        spike: A loss of more than so many times the median of the last 128 of its rank is a spike. None: none is.
        on_spike: "log": a warning names the step, and the command that shows its rows. "raise": LossSpike does.

    Returns:
        One dict per epoch, including those before a resume, with: "epoch"; "loss" and the logged scalars, averaged over
        the rows of all ranks, or by `loss_weight` (the loss is NaN if all batches weigh 0); "rows" of all ranks;
        "seconds" and "wait_seconds" (waiting for batches), averaged over processes; "straggler" (a rank) and
        "straggler_seconds", if one held the others up; "skipped_steps" (overflows in fp16); "rows_per_second";
        "stall_fraction"; the counts in the loader's stats, summed over processes, tensor-parallel peers included, and
        its waits by cause, averaged over them, both only since the last resume; and the scalars of `evaluate` on this
        rank (before a resume: on rank 0), named `evaluate.name` if the name is taken. A run that ends within an epoch
        has a last dict of its part of this epoch, with "unfinished": True.

    Raises:
        ConfigError: An argument is invalid, ranks see different data or checkpoints, the checkpoint to resume from is
            damaged, another run saves into `checkpoint_dir`, a state is not plain data, or a plain parameter that a
            checkpoint would have once differs between ranks.
        NonFiniteLoss: A loss or a parameter is NaN or infinite.
        LossSpike: A loss is a spike, with `on_spike="raise"`.
        SystemExit: One of `stop_signals` has ended the run, which is saved.
        RuntimeError: Another rank was lost (on CPUs). As in all errors of a step, a note names rank, epoch and step.

    Example:
        >>> import torch
        >>> from dataload import fit
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> batches = [{"x": torch.ones(4, 2), "y": torch.zeros(4, 1)}] * 8
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        >>> history = fit(model, optimizer, batches, loss_fn, epochs=2, progress=False)
        >>> [record["rows"] for record in history]
        [32, 32]
    """
    check_options(precision, accumulate, clip_grad_norm)
    check_loss_weight(loss_weight)
    spikes = Spikes(spike, on_spike)
    spikes.check()
    check_choice(on_change)
    _check_arguments(comm_hook, epochs, checkpoint_every, log_every, scheduler, loader)
    mesh, world = _data_parallel(loader, mesh)
    _check_parameters(model, optimizer, precision, alone=world.world_size == 1 and checkpoint_dir is None)
    device = device_of(World.detect(), device)

    stop = StopSignal(stop_signals)
    ending = Ending(stop, max_steps, max_seconds)

    def train() -> list[dict[str, Any]]:
        limits = (tuple(sorted(stop_signals or ())), max_steps, max_seconds is not None)
        agree("stop_signals, max_steps and whether there are max_seconds", limits)
        _check_ranks(loader, world, mesh)
        stats_dir = on_all(lambda: None if log_dir is None or is_url(log_dir) else local_folder("log_dir", log_dir))
        traces = on_all(lambda: None if profile is None else local_folder("profile", profile))
        move(model, optimizer, device)
        begin_training(model)
        with recomputed(model, activation_checkpointing), closing(Checkpoints(checkpoint_dir, keep)) as checkpoints:
            exchange = exchange_between(world, model, device, mesh, comm_hook=comm_hook, static_graph=static_graph)
            exchange.compile(compile)
            loop = TrainingLoop(
                model,
                loader,
                OptimizerStep(exchange, optimizer, loss_fn, device, precision, accumulate, clip_grad_norm, scheduler),
                world,
                checkpoints,
                LossMonitor(world.rank, check=check_finite, spikes=spikes),
                ending,
                checkpoint_every=checkpoint_every,
                evaluate=evaluate,
                mesh=mesh,
                stats_dir=stats_dir,
                weigh=None if loss_weight is None else partial(weight_of, loss_weight),
                on_change=on_change,
            )
            if (log_dir or checkpoint_dir) and not loop.replay and isinstance(loader, Loader) and is_first():
                log.warning(
                    "%s is a URL, so the run keeps no ledger, and dataload rows cannot tell what its steps saw: pass "
                    "stats_dir to make_loader, or a folder as log_dir",
                    "log_dir" if log_dir else "checkpoint_dir",
                )
            resumed = loop.resume(checkpoints.find(resume))
            with _recorded(loop, log_dir, log_every, device, traces):
                return loop.run(epochs, resumed, show_progress=progress and is_first())

    with process_group(world, device, timeout):
        with stop:  # A rank that still waits for the others ends at a signal.
            history = train()
        # To close a run may take a minute. From here on the signals end the process again, so that none is lost.
        if not ending.by_signal and ending.ask_signals() and is_first():
            log.warning("%s came when the run had ended already: the program ends, too", ending.reason)
    if ending.by_signal:
        raise SystemExit(0)
    return history


@contextmanager
def _recorded(
    loop: TrainingLoop,
    log_dir: str | os.PathLike[str] | None,
    log_every: int,
    device: torch.device,
    traces: Path | None,
) -> Iterator[None]:
    """Record the loop for TensorBoard and the profiler during the block."""
    with ExitStack() as stack:

        def log_to() -> None:
            if log_dir is not None:
                writer = TensorBoardWriter(loop.stats_dir or log_dir, log_every, device, loop.step)
                loop.tensorboard = stack.enter_context(closing(writer))

        on_first(log_to)
        loop.traced = stack.enter_context(traced(traces, World.detect().rank))
        yield


def _check_arguments(
    comm_hook: str | None,
    epochs: int,
    checkpoint_every: int | None,
    log_every: int,
    scheduler: Any,
    loader: Any,
) -> None:
    if comm_hook is not None and comm_hook not in COMM_HOOKS:
        raise ConfigError(f"comm_hook={comm_hook!r} is not one of {', '.join(COMM_HOOKS)}")
    whole_number("epochs", epochs, least=0)
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise ConfigError(f"scheduler={scheduler!r} has no step(): pass a torch.optim.lr_scheduler of the optimizer")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau follows a metric, but fit steps its scheduler after each optimizer step: step it in "
            "evaluate, with the metric, and leave scheduler out. fit saves the state of an evaluate that has "
            "state_dict and load_state_dict"
        )
    for name, steps in (("checkpoint_every", checkpoint_every), ("log_every", log_every)):
        if steps is not None:
            whole_number(name, steps, least=1)
    if checkpoint_every is not None and not hasattr(loader, "load_state_dict"):
        raise ConfigError(
            "checkpoint_every: this loader has no state_dict, so it can be resumed only at the end of an epoch"
        )


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, *, alone: bool) -> None:
    """Raise ConfigError if the model is in DDP or FSDP1, or the optimizer has other parameters than the model.

    Args:
        model: The model.
        optimizer: The optimizer.
        precision: The precision, which not every sharded model can have.
        alone: Whether there is one rank, which saves nothing: then the optimizer may have further parameters.
    """
    check_not_wrapped(model)
    if precision == "fp16":
        check_overflows_are_shared(model)
    own = set(model.parameters())
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if own and not own & trained:
        raise ConfigError(
            "the optimizer has none of the model's parameters, so it would train nothing: make it from "
            "model.parameters(), after fully_shard or any other change that replaces them"
        )
    if not (alone or trained <= own):
        raise ConfigError(
            "the optimizer has parameters that the model lacks, which fit neither exchanges between ranks nor saves: "
            "make their module, such as a loss, a submodule of the model"
        )


def _data_parallel(loader: Any, mesh: DeviceMesh | None) -> tuple[DeviceMesh | None, World]:
    """Return the mesh of the data-parallel ranks, which may be the loader's, and this rank among them."""
    mesh = loader.mesh if mesh is None and isinstance(loader, Loader) else mesh
    return mesh, World.detect() if mesh is None else World.from_mesh(mesh)


def _check_ranks(loader: Any, world: World, mesh: DeviceMesh | None) -> None:
    """Raise ConfigError unless the ranks of a loader are the data-parallel ranks of the run, as far as it is known."""
    check_ranks_run(loader)
    dataset = getattr(loader, "dataset", None)
    digest = "order_key" if isinstance(dataset, MapStyle) else "fingerprint"
    if isinstance(dataset, MapStyle):  # Hosts may have other URLs for a table.
        versions = tuple(each.manifest.pinned.rpartition("@")[2] for each in dataset.datasets)
        agree("the version of the table", versions[0] if len(versions) == 1 else versions)
    agree(f"the dataset's {digest}", getattr(dataset, digest, None))
    if isinstance(dataset, MapStyle):
        stages = [stage for each in dataset.datasets for stage in each.stages]
        agree("the functions of map", tuple((stage.function.name, stage.key) for stage in stages))
    if isinstance(loader, Loader):
        if isinstance(loader.dataset, Mixture):
            agree("the weights of the mixture", loader.dataset.weights)
        ranks, sampler = world.world_size, loader.rank_sampler
        is_equal = (sampler.num_replicas, sampler.rank) == (ranks, world.rank)
        is_chosen = mesh is None and not loader.detected  # by world=, which may be any rank
        if not all(gather(is_equal or is_chosen)):
            raise ConfigError(
                f"this is data-parallel rank {world.rank} of {ranks}, and its loader has rank {sampler.rank} of "
                f"{sampler.num_replicas}, but these differ on some rank: make the loader after the ranks have been "
                "started, and by make_loader(..., mesh=mesh) if there is a mesh of the data-parallel ranks"
            )
        agree("the order of the loader's rows", (sampler.num_replicas, sampler.num_nodes, sampler.order.num_streams))
        if sampler.num_replicas > 1:
            agree("batch_size and drop_last of the loader", (sampler.batch_size, sampler.drop_last))
            agree("the shuffle of the loader", json.dumps(sampler.order.options, sort_keys=True, default=str))
