"""Checks of the limits of this machine or its container: memory, open files, processors."""

from __future__ import annotations

import resource
import shutil

from rich.filesize import decimal

from dataload.doctor.finding import Case, Finding, ok, problem, warning
from dataload.errors import ConfigError
from dataload.runtime.resource_limits import usable_cores
from dataload.world import World

DESCRIPTORS, DESCRIPTORS_PER_WORKER = 512, 64
ADVISED_DESCRIPTORS = 65_536
LOCKED_BYTES = 64 << 20
SHARED_BYTES = 256 << 20  # assumed for a rank with workers if the size of a batch is unknown


def shared_memory(case: Case) -> Finding:
    try:
        free = shutil.disk_usage(case.shared_memory).free
    except OSError:
        return warning(f"there is no {case.shared_memory}", "mount it: workers pass batches through it")
    ranks, rank_bytes = _local_world_size(case), case.in_flight
    if rank_bytes is None:
        rank_bytes = SHARED_BYTES if case.num_workers else 0
    if free < ranks * rank_bytes:
        return problem(
            f"{case.shared_memory} has {decimal(free)} free, but {ranks * case.num_workers} workers need "
            f"{decimal(ranks * rank_bytes)}",
            "enlarge it (docker run --shm-size=8g, or --ipc=host), or lower batch_size, num_workers or prefetch",
        )
    return ok(f"{case.shared_memory} has {decimal(free)} free")


def descriptors(case: Case) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS + DESCRIPTORS_PER_WORKER * case.num_workers
    if soft != resource.RLIM_INFINITY and soft < needed:
        advised = max(needed, ADVISED_DESCRIPTORS)
        allowed = advised if hard == resource.RLIM_INFINITY else min(hard, advised)
        elsewhere = f"LimitNOFILE={advised} in the service, docker run --ulimit nofile={advised}"
        return problem(
            f"a process may open {soft:,} files, but {case.num_workers} workers need about {needed:,}",
            f"ulimit -n {allowed}, or {elsewhere}"
            if allowed >= needed
            else f"have root raise the hard limit of {hard:,}: nofile {advised} in limits.conf, {elsewhere}",
        )
    return ok("a process may open any number of files" if soft < 0 else f"a process may open {soft:,} files")


def locked_memory(case: Case) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = max(LOCKED_BYTES, (case.row_bytes or 0) * case.batch_size * case.prefetch)
    if case.pin_memory and soft != resource.RLIM_INFINITY and soft < needed:
        return warning(
            f"a process may lock {decimal(soft)} of memory, but pinned batches and NCCL over InfiniBand need "
            f"{decimal(needed)}",
            "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity in the service",
        )
    return ok(
        "a process may lock any amount of memory" if soft < 0 else f"a process may lock {decimal(soft)} of memory"
    )


def processors(case: Case) -> Finding:
    count, ranks = usable_cores(), _local_world_size(case)
    needed = ranks * (case.num_workers + 1)
    if needed > count:
        fewer = f"num_workers={count // ranks - 1}"
        if count < ranks:
            fewer = f"at most {count} rank{'s' * (count != 1)} on this host, with num_workers=0"
        return warning(
            f"{count} processors for {ranks} ranks of {case.num_workers} workers each: {needed} processes",
            f"{fewer}, or give the job more processors (docker --cpus, Slurm --cpus-per-task)",
        )
    return ok(f"{count} processors for {needed} process{'es' * (needed != 1)}")


def _local_world_size(case: Case) -> int:
    if case.local_world_size is not None:
        return case.local_world_size
    try:
        return World.detect().local_world_size or 1
    except ConfigError:
        return 1
