"""What this machine, or its container, allows a training to have."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from rich.filesize import decimal

from dataload.doctor.finding import Case, Finding, ok, problem, warning
from dataload.errors import ConfigError
from dataload.world import World

DESCRIPTORS, DESCRIPTORS_OF_A_WORKER = 512, 64
MANY_DESCRIPTORS = 65_536  # what to ask for, once one asks
LOCKED_BYTES = 64 << 20
SHARED_BYTES = 256 << 20  # of a rank, where it is not known how large batches are
MAPS = 65_530  # Linux's default


def shared_memory(case: Case) -> Finding:
    try:
        status = os.statvfs(case.shared_memory)
    except OSError:
        return warning(f"there is no {case.shared_memory}", "mount it: workers hand batches over through it")
    free = status.f_bavail * status.f_frsize
    ranks, of_a_rank = _local_ranks(), case.in_flight
    if of_a_rank is None:
        of_a_rank = SHARED_BYTES if case.num_workers else 0
    if free < ranks * of_a_rank:
        held = f"{ranks * case.num_workers} workers hold {decimal(ranks * of_a_rank)} there"
        return problem(
            f"{case.shared_memory} has {decimal(free)}, and {held}",
            "give it more (docker run --shm-size=8g, or --ipc=host), or lower batch_size, num_workers or prefetch",
        )
    return ok(f"{case.shared_memory} has {decimal(free)}")


def descriptors(case: Case) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS + DESCRIPTORS_OF_A_WORKER * case.num_workers
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = max(needed, MANY_DESCRIPTORS)
        may = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        raised = f"LimitNOFILE={wanted} in the service, docker run --ulimit nofile={wanted}"
        return problem(
            f"a process may open {soft:,} files, {case.num_workers} workers take about {needed:,}",
            f"ulimit -n {may}, or {raised}"
            if may >= needed
            else f"have root raise the hard limit of {hard:,}: nofile {wanted} in limits.conf, {raised}",
        )
    return ok("any number of files may be open" if soft < 0 else f"{soft:,} files may be open")


def locked_memory(case: Case) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = max(LOCKED_BYTES, (case.row_bytes or 0) * case.batch_size * case.prefetch)
    if case.pin_memory and soft != resource.RLIM_INFINITY and soft < needed:
        return warning(
            f"a process may lock {decimal(soft)} of memory; pinned batches, and NCCL over InfiniBand, take "
            f"{decimal(needed)}",
            "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity in the service",
        )
    return ok("any amount of memory may be locked" if soft < 0 else f"{decimal(soft)} of memory may be locked")


def maps(case: Case) -> Finding:
    try:
        most = int(case.max_map_count.read_text())
    except (OSError, ValueError):
        return ok("how many maps of files a process may have cannot be told")
    if most < MAPS:
        return problem(
            f"a process may have {most:,} maps of files, fewer than Linux's default",
            f"sysctl -w vm.max_map_count={4 * MAPS}",
        )
    return ok(f"{most:,} maps of files")


def processors(case: Case) -> Finding:
    count, ranks = cpus(), _local_ranks()
    wanted = ranks * (case.num_workers + 1)
    if wanted > count:
        fewer = f"num_workers={count // ranks - 1}"
        if count < ranks:
            fewer = f"at most {count} rank{'s' * (count != 1)} on this host, with num_workers=0"
        return warning(
            f"{count} processors for {ranks} ranks of {case.num_workers} workers each: {wanted} processes",
            f"{fewer}, or give the job more (docker --cpus, Slurm --cpus-per-task)",
        )
    return ok(f"{count} processors for {wanted} process{'es' * (wanted != 1)}")


def cpus(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Processors that this process may use, by its affinity and its container's quota."""
    count = len(os.sched_getaffinity(0))
    try:
        share, period = quota.read_text().split()
        return max(1, min(count, int(share) // int(period)))
    except (OSError, ValueError):
        return count


def _local_ranks() -> int:
    try:
        return World.detect().local_world_size or 1
    except ConfigError:
        return 1
