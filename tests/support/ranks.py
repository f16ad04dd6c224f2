"""Ranks in their own processes, which fork from a process that has imported torch."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
from contextlib import suppress
from multiprocessing.connection import wait

import pytest
import torch.distributed as dist

SPAWN = multiprocessing.get_context("spawn")
DEADLINE = 120  # seconds for all ranks together; only a hang takes that long


class LostError(Exception):
    """The end of a rank without an answer: the negative number of a signal, or "hung"."""


def launchers_store():
    """Return the server of a store, which the launcher has, as with torchrun, so that no port is guessed."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(name="ranks", scope="session")
def forked_ranks():
    """Return `ranks(number, function, *args, **kwargs)`, which runs a function on `number` ranks.

    It returns the result or the exception of each rank. With `until=rank` it kills the other ranks after the answer of
    that rank. With `store`, they meet where earlier ranks have met, as in another attempt of torchrun.
    """
    pipe, theirs = SPAWN.Pipe()
    nursery = SPAWN.Process(target=_nurse, args=(theirs,))
    nursery.start()
    theirs.close()
    assert pipe.recv() == "ready"  # The deadlines of ranks count from here.

    def run(number, function, *args, until=None, store=None, **kwargs):
        store = store or launchers_store()
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
        environ |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
        environ |= {"PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"]}  # not that of the test that began first
        environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        pipe.send((number, environ, until, function, args, kwargs))
        if not pipe.poll(DEADLINE + 10):
            nursery.kill()  # The next call must not get the answer to this one.
            raise AssertionError("the ranks' parent does not answer")
        return [answer if isinstance(answer, LostError) else pickle.loads(answer) for answer in pipe.recv()]

    yield run
    pipe.send(None)
    nursery.join(200)
    if nursery.is_alive():
        nursery.kill()
        nursery.join()
    assert nursery.exitcode == 0


def steps_of(ranks, size, dying, folder, function, *args):
    """Run a function on ranks, of which `dying` is killed (-1: none). Return the steps that all have taken.

    The function writes a line of JSON for each of its steps into `folder / its rank`.
    """
    folder.mkdir()
    ends = ranks(size, function, *args)
    assert [isinstance(end, LostError) for end in ends] == [rank == dying for rank in range(size)]
    lines = [map(json.loads, (folder / str(rank)).read_text().splitlines()) for rank in range(size)]
    return list(zip(*lines, strict=False))


def _nurse(pipe):
    import torch

    import dataload.loader.loader
    import dataload.train.harness  # noqa: F401 - imported once for all ranks

    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports more modules
    fork = multiprocessing.get_context("fork")
    pipe.send("ready")
    with suppress(EOFError):
        while (job := pipe.recv()) is not None:
            number, environ, until, *call = job
            pairs = [fork.Pipe(duplex=False) for _ in range(number)]
            processes = []
            gc.freeze()  # Ranks collect no garbage in what is imported, and search it for no meshes.
            for rank, (_, answers) in enumerate(pairs):
                own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(fork.Process(target=_rank, args=(answers, own, *call)))
                processes[-1].start()
                answers.close()
            pipe.send(_answers([answers for answers, _ in pairs], processes, until))


def _rank(answers, environ, function, args, kwargs):
    os.environ.update(environ)
    import torch

    torch.set_num_threads(1)
    try:
        answer = function(*args, **kwargs)
    except Exception as error:
        answer = error
    answers.send_bytes(pickle.dumps(answer))  # tensors by value: this process exits before the test reads them


def _answers(pipes, processes, until):
    found = {}
    while len(found) < len(pipes) and until not in found:
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in found], DEADLINE)
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                found[rank] = pipe.recv_bytes()
            except EOFError:
                processes[rank].join()
                found[rank] = LostError(processes[rank].exitcode)
    for rank, process in enumerate(processes):
        if rank not in found:
            process.kill()
        process.join()
        pipes[rank].close()
    return [found.get(rank, LostError("hung")) for rank in range(len(pipes))]
