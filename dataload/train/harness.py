"""Training: torch's own DDP, autocast, GradScaler, checkpoints and profiler, put together in the right order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.train.activation_checkpointing import ModuleSelector, recomputed
from dataload.train.batch_size import find_batch_size
from dataload.train.checkpoint import Checkpoints
from dataload.train.distributed import COMM_HOOKS, agree, device_of, gather, process_group, replicate
from dataload.train.epoch_metrics import progress_bar
from dataload.train.evaluation import evaluate_over
from dataload.train.loop import TrainingLoop
from dataload.train.loss_monitor import LossMonitor
from dataload.train.module_modes import begin_training
from dataload.train.optimizer_step import LossFn, OptimizerStep
from dataload.train.profiling import traced
from dataload.train.tensorboard import TensorBoardWriter
from dataload.world import World

__all__ = ["evaluate_over", "find_batch_size", "fit"]


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    loss_fn: LossFn,
    *,
    epochs: int,
    precision: str = "bf16",
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
    check_finite: bool = True,
    timeout: float | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    log_every: int = 10,
    profile: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Train `model` in place until `epochs` epochs are done; returns one dict per epoch, those before a resume too.

    Under torchrun (or any launcher's environment) the ranks train together by DDP, on `cuda:LOCAL_RANK` over NCCL or
    on the CPU over gloo. A process group that nobody has started is started here and ended here, come what may.

    model: each module trains in the mode that it is in when `fit` is called, and has this mode again after each
        evaluation: a BatchNorm in eval mode stays frozen. If all modules are in the same mode, as in a new model or
        after `model.eval()`, `fit` calls `model.train()`.
    loss_fn(model, batch): the mean loss over the batch's rows, a scalar tensor; or it and a dict of scalars to log.
        A scalar with the name of one of the epoch's own figures (see below) is a ConfigError.
        A batch is a dict (or tuple, or list) whose tensors are on the device.
    precision: autocast to "bf16" or "fp16" (with the loss scaled), or "fp32" for none.
    accumulate: batches per optimizer step. A step's gradient is that of the mean over all rows of its batches on all
        ranks, also of an epoch's last step, which has what is left. Ranks whose loaders end early take part with none,
        and batches without rows are passed over.
    clip_grad_norm: limit on the norm of the averaged gradients.
    scheduler: its step() is called after every optimizer step, not after every epoch.
    activation_checkpointing: classes of modules, or a function of a module, whose activations are computed twice.
    comm_hook: gradients cross ranks as "bf16" or "fp16", or by "powersgd" (whose memory of what it left out starts anew
        after a resume).
    static_graph: promises DDP the same graph in each step: it then allows for parameters that get no gradient. (But a
        run of three ranks or more that goes on may then differ in the last bits from one that was never stopped.)
    compile: True, or the arguments of torch.compile.
    evaluate(model): called on every rank after each epoch, in eval mode and without gradients; returns scalars. See
        `evaluate_over`.
    checkpoint_dir: a folder that all ranks see; a ConfigError at the start names the ranks that do not. It gets a
        checkpoint at each epoch's end, before `evaluate`, and each `checkpoint_every` optimizer steps. The last `keep`
        are kept.
    resume: "auto" goes on from the last checkpoint in `checkpoint_dir` if there is one, None starts anew, a path must
        exist. From an epoch's end it goes on with `evaluate`. At the same world size the run ends as if it had never
        stopped, random generators included; at another one a loader must have been in the same state on all ranks.
    check_finite: stop at a loss that is NaN or infinite; on a GPU some steps later, for no step waits for its loss. And
        stop, before a checkpoint and at an epoch's end, at parameters that are.
    timeout: seconds that a rank waits for the others before it gives up; None: torch's default.
    log_dir: TensorBoard gets loss, rows per second, stall fraction, memory (bytes, at its peak) and learning rate each
        `log_every` steps, and each epoch's dict; and, by a loader of `make_loader` that has no `stats_dir` of its own,
        what `dataload report` reads.
    profile: a folder for a trace of ten early steps of each rank, with the stages of loop and loader by name; Nsight
        Systems sees these names in all steps.

    An epoch's dict: epoch; loss and logged scalars, averaged over all ranks' rows of the batches they were logged with;
    rows of all ranks; seconds and wait_seconds (for batches), averaged over ranks; rows_per_second; stall_fraction;
    what the loader's stats count, summed over ranks; what `evaluate` returned on this rank (before a resume: on rank
    0), as `evaluate.name` where the name is taken.

    Raises ConfigError for arguments that cannot work, when ranks see different data or different checkpoints, and when
    a state that is to be saved is no plain data; NonFiniteLoss; and whatever torch raises when a rank is lost. A note
    on the error says at which step.
    """
    if comm_hook is not None and comm_hook not in COMM_HOOKS:
        raise ConfigError(f"comm_hook={comm_hook!r} is none of {', '.join(COMM_HOOKS)}")
    if checkpoint_every is not None and not hasattr(loader, "load_state_dict"):
        raise ConfigError("checkpoint_every: this loader has no state_dict, it can be resumed at an epoch's end alone")
    world = World.detect()
    device = device_of(world, device)
    steps = OptimizerStep(model, optimizer, loss_fn, device, precision, accumulate, clip_grad_norm, scheduler)
    with ExitStack() as stack:
        stack.enter_context(process_group(world, device, timeout))
        agree("the dataset's fingerprint", getattr(getattr(loader, "dataset", None), "fingerprint", None))
        sizes = gather(_known_size(loader))
        checkpoints = Checkpoints(checkpoint_dir, keep)
        run = TrainingLoop(
            model.to(device),
            loader,
            steps,
            world,
            checkpoints,
            LossMonitor(world.rank, check=check_finite),
            even=None not in sizes and len(set(sizes)) == 1,
            checkpoint_every=checkpoint_every,
            evaluate=evaluate,
        )
        begin_training(model)
        run.resume(checkpoints.find(resume))
        stack.enter_context(recomputed(model, activation_checkpointing))
        if world.world_size > 1:
            steps.model = steps.replica = replicate(model, device, comm_hook=comm_hook, static_graph=static_graph)
        if compile:
            steps.model = torch.compile(steps.model, **(compile if isinstance(compile, Mapping) else {}))
        if log_dir is not None and world.rank == 0:
            run.tensorboard = stack.enter_context(closing(TensorBoardWriter(log_dir, log_every, device)))
        if log_dir is not None and isinstance(loader, Loader) and loader.stats_dir is None:
            loader.stats_dir = Path(log_dir)
            stack.callback(setattr, loader, "stats_dir", None)
        run.traced = stack.enter_context(traced(profile, world.rank))
        run.conclude()  # what another process has ended, and perhaps not evaluated
        for epoch in range(len(run.history), epochs):
            _set_epoch(loader, epoch)
            with progress_bar(f"epoch {epoch + 1}/{epochs}", _length(loader), progress and world.rank == 0) as advance:
                run.epoch(epoch, advance)
            run.conclude()
    return run.history


def _set_epoch(loader: Any, epoch: int) -> None:
    ordered: Any = loader if hasattr(loader, "set_epoch") else getattr(loader, "sampler", None)
    if hasattr(ordered, "set_epoch"):
        ordered.set_epoch(epoch)


def _known_size(loader: Any) -> tuple[int | None, int] | None:
    """The rows of a batch, and the batches of an epoch, where they are known before: of our loader, as it is."""
    return (loader.batch_size, len(loader)) if isinstance(loader, Loader) and loader.maker.only_gathers else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an iterable without a length
        return None
