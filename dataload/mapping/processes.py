"""Calls of the user's function in child processes, for functions that hold the interpreter lock."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import closing

from dataload.formats.schema import Layout
from dataload.mapping.running import ChunkError, blob_of, column_of, in_flight, records_of, shown
from dataload.mapping.stage import Stage
from dataload.rows.columns import Column, length_of
from dataload.rows.row_block import Blob, Records
from dataload.runtime.child_process import ChildProcesses, ProcessDied, serve

_ROWS_BYTES = 8  # of a request and an answer, before the blob of its rows
_DONE, _FAILED = b"\0", b"\1"  # the first byte of an answer


class ProcessRunner:
    """Calls the function in processes. Rows come and go as blobs of records, so only the function is pickled.

    Args:
        stage: The map.
        given: The columns of a chunk.
        layout: The mapped columns.
    """

    def __init__(self, stage: Stage, given: Layout, layout: Layout) -> None:
        assert stage.processes is not None
        self._given, self._layout = given, layout
        hello = pickle.dumps((stage.only(stage.manifest.only([])), given.fields, layout.fields))
        self.processes = ChildProcesses(stage.processes, f"{__name__}:run", hello)

    def each(self, chunks: Iterable[Records], ahead: int) -> Generator[dict[str, Column], None, None]:
        """Yield the mapped rows of each chunk, in order. `ahead` chunks, and another one, are under way.

        Raises:
            ChunkError: The function raised, it returned other columns, or processes ended during a call.
        """
        try:
            with closing(in_flight(chunks, self._submit, ahead)) as answers:
                for answer in answers:
                    yield self._received(memoryview(answer))
        except ProcessDied as error:
            raise ChunkError(None, str(error)) from error

    def _submit(self, records: Records) -> Future[bytes]:
        columns = {field.name: column_of(records, field) for field in self._given.fields}
        request = blob_of(columns, len(records), self._given, "a chunk")
        return self.processes.submit(len(records).to_bytes(_ROWS_BYTES) + request)

    def _received(self, answer: memoryview) -> dict[str, Column]:
        if answer[:1] == _FAILED:
            raise ChunkError(*json.loads(bytes(answer[1:])))
        rows, content = int.from_bytes(answer[1 : 1 + _ROWS_BYTES]), answer[1 + _ROWS_BYTES :]
        blob = Blob(content, rows, self._layout)
        return {field.name: blob.column(field) for field in self._layout.fields}


def run(descriptor: int) -> None:
    """Run a child process."""
    serve(descriptor, _start)


def _start(hello: bytes) -> Callable[[bytes], bytes | bytearray]:
    try:
        stage, given, fields = pickle.loads(hello)  # noqa: S301 (of the parent, through its socket)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (the modules of the function may raise anything, also SystemExit)
        failure = _failed(ChunkError(None, f"a process cannot load the function: {type(error).__name__}: {error}"))
        return lambda _: failure
    runner, made = stage.runner(given), stage.makes
    layout, mapped = Layout(given), Layout(fields)

    def answer(request: bytes) -> bytes | bytearray:
        rows = int.from_bytes(request[:_ROWS_BYTES])
        try:
            found = runner.columns(records_of(memoryview(request)[_ROWS_BYTES:], rows, layout), made)
            count = length_of(next(iter(found.values())))
            return _DONE + count.to_bytes(_ROWS_BYTES) + blob_of(found, count, mapped, "a chunk")
        except ChunkError as error:
            return _failed(error)
        except Exception as error:  # noqa: BLE001 (such as a MemoryError)
            return _failed(ChunkError(None, shown(error)))

    return answer


def _failed(error: ChunkError) -> bytes:
    return _FAILED + json.dumps([error.row, error.text]).encode()
