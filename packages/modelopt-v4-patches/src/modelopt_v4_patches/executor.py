"""Who does independent tasks: processes of this machine, or a Ray cluster.

A task is an importable function and one picklable item; results come in any order. A process
that dies (of memory, mostly) becomes an error that names its item, never a hang.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from nvfp4_codec.checkpoint.job import Job, Spread, write_shard

from .errors import ExecutorError

T = TypeVar("T")
R = TypeVar("R")


class Executor(Protocol):
    """Anything with this ``map``. An item appears in error messages as ``str`` gives it."""

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """The results in any order. Raises what a task raised, or ExecutorError."""
        ...


def make_executor(kind: Literal["local", "ray"], workers: int | None = None) -> Executor:
    """The executor of a command line. workers: processes; Ray decides by the cluster's cores."""
    return LocalProcesses(workers) if kind == "local" else RayExecutor()


@dataclass(frozen=True)
class LocalProcesses:
    """Processes of this machine, started afresh: a fork of a process with threads may hang.

    workers: None means one for each core; never more than items. One means this process itself.
    """

    workers: int | None = None

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """See ``Executor.map``."""
        cores = len(os.sched_getaffinity(0))
        count = min(cores if self.workers is None else self.workers, len(items))
        if count <= 1:
            yield from map(function, items)
            return
        todo = list(reversed(items))
        workers: dict[Connection, _Worker] = {}
        try:
            for _ in range(count):
                worker = _Worker(function, threads=max(1, cores // count))
                workers[worker.pipe] = worker
                worker.give(todo.pop())
            while workers:
                for pipe in wait(list(workers)):
                    assert isinstance(pipe, Connection)
                    worker = workers[pipe]
                    result = worker.take()
                    if todo:
                        worker.give(todo.pop())
                    else:
                        workers.pop(pipe).stop()
                    yield result
        finally:
            for worker in workers.values():
                worker.process.terminate()
            for worker in workers.values():
                worker.stop()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, function: Callable[[Any], Any], threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process: BaseProcess = spawn.Process(target=_serve, args=(theirs, threads))
        self.process.daemon = True
        self.process.start()
        theirs.close()  # the only open end is now the worker's: its death ends the pipe
        self.item: Any = None
        self._send(function)

    def give(self, item: Any) -> None:
        """Hands it a task."""
        self.item = item
        self._send(item)

    def take(self) -> Any:
        """The result of its task."""
        try:
            error, result = self.pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """Lets it end; returns when it has."""
        self.pipe.close()
        self.process.join()
        self.process.close()

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # dead: the next ``take`` says so, with the item
            self.pipe.send(message)

    def _death(self) -> ExecutorError:
        self.process.join()
        code = self.process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return ExecutorError(
            f"{self.item}: the worker process {how}{hint}. What is finished stays: run the same "
            "command with --resume; fewer --workers need less memory."
        )


def _serve(pipe: Connection, threads: int) -> None:
    """A worker's life: a function, then item after item until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when torch is imported
    try:
        function = pipe.recv()
        while True:
            pipe.send(_attempt(function, pipe.recv()))
    except (EOFError, BrokenPipeError):
        return


def _attempt(function: Callable[[Any], Any], item: Any) -> tuple[Exception | None, Any]:
    try:
        return None, function(item)
    except Exception as error:
        error.add_note("In the worker:\n" + "".join(traceback.format_exception(error)))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an exception class that pickles badly
            return ExecutorError(f"{item}: {type(error).__name__}: {error}"), None
        return error, None


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@dataclass(frozen=True)
class RayExecutor:
    """A Ray cluster, or a local Ray if there is none; the file system must be shared.

    A Ray that is initialized already is used as it is. address: see ``ray.init``. cores: of one
    task. retries: how often a task is given to another worker after its own was lost.
    """

    address: str | None = None
    cores: int = 1
    retries: int = 3

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """See ``Executor.map``."""
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise ExecutorError(
                f"--executor ray needs ray ({error}): pip install 'modelopt-v4-patches[ray]'"
            ) from None
        ours = not ray.is_initialized()
        if ours:
            ray.init(address=self.address, log_to_driver=False)
        pending: dict[Any, T] = {}
        try:
            task = ray.remote(num_cpus=self.cores, max_retries=self.retries)(_apply)
            stored = ray.put(function)
            pending = {task.remote(stored, item): item for item in items}
            while pending:
                (done, *_), _ = ray.wait(list(pending))
                item = pending.pop(done)
                try:
                    result = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError as error:
                    raise ExecutorError(
                        f"{item}: its worker was lost, {self.retries + 1} in all "
                        f"({type(error).__name__}). What is finished stays: run the same command "
                        "with --resume."
                    ) from error
                yield result
        finally:
            for left in pending:
                ray.cancel(left, force=True)
            if ours:
                ray.shutdown()


def _apply(function: Callable[[T], R], item: T) -> R:
    return function(item)


def spread_with(executor: Executor, make_job: Callable[[], Job]) -> Spread | None:
    """How an executor writes a job's shards; None where that is the same as no executor.

    make_job: a ``functools.partial`` of a module's function and picklable arguments (absolute
    paths: a cluster's workers run elsewhere). Each worker makes the job once.
    """
    if executor == LocalProcesses(1):
        return None

    def spread(files: Sequence[str], folder: Path) -> Iterator[str]:
        return executor.map(partial(_write, make_job, folder.absolute()), files)

    return spread


def _write(make_job: Callable[[], Job], folder: Path, file: str) -> str:
    write_shard(_job_of(make_job), file, folder)
    return file


_jobs: dict[bytes, Job] = {}


def _job_of(make_job: Callable[[], Job]) -> Job:
    """This process's copy of the job: the last one stays, with its files open."""
    key = pickle.dumps(make_job)
    if key not in _jobs:
        while _jobs:
            _jobs.popitem()[1].source.close()
        _jobs[key] = make_job()
    return _jobs[key]
