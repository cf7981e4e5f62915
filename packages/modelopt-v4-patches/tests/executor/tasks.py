"""What the tests have other processes do; in a module of its own, which those can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from modelopt_v4_patches.executor import Executor, spread_with
from nvfp4_codec.checkpoint.job import Job, Outcome, Step, run
from nvfp4_codec.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4_codec.checkpoint.rewrite import Rewrite, documents
from nvfp4_codec.checkpoint.writer import ShardWriter
from nvfp4_codec.errors import CheckpointError


class StubbornError(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def square(item: int) -> tuple[int, int, str]:
    """The square, and where it was computed."""
    time.sleep(0.02)
    return item * item, os.getpid(), os.environ.get("OMP_NUM_THREADS", "")


def fail(item: int) -> int:
    if item == 3:
        raise CheckpointError("is broken.", file="a", tensor="b")
    if item == 5:
        raise StubbornError(1, 2)
    return item


def die(item: str) -> str:
    if item == "shard-2":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "shard-3":
        os._exit(7)
    return item


def die_always(item: int) -> int:
    os._exit(1)


def wait_for_ever(folder: Path, item: int) -> None:
    (folder / f"{item}-{os.getpid()}").touch()
    time.sleep(600)


def run_job(
    make: Callable[[], Job], output: Path, executor: Executor | None = None, *, resume: bool = False
) -> Outcome:
    """The job, its shards written by the executor."""
    job = make()
    with job.source:
        spread = None if executor is None else spread_with(executor, make)
        return run(job, output, resume=resume, spread=spread)


def make_job(source: Path, marks: Path | None = None) -> Job:
    """Inverts every byte, and notes it.

    marks: a folder. The first process that has written half of a shard dies there, once for all.
    """
    checkpoint = Checkpoint.open(source)
    plan = Rewrite(checkpoint)
    for info in checkpoint:
        plan.produce(info.file, [info.spec], _inverted(checkpoint, info), info.offset)
    small = documents(checkpoint, lambda config: None)
    if marks is not None:
        second = plan.shards()[1].file
        middle = max(info.offset for info in checkpoint if info.file == second)
        plan.produce(second, [], _deadly(marks), middle - 1)
    return Job("invert", {}, checkpoint, plan.shards(), small, manifest="manifest.json")


def _inverted(source: Checkpoint, info: TensorInfo) -> Step:
    def step(writer: ShardWriter) -> None:
        data: Any = np.invert(source.read(info.name))
        writer.write(info.name, data)
        writer.note(info.name, info.nbytes)

    return step


def _deadly(marks: Path) -> Step:
    def step(writer: ShardWriter) -> None:
        try:
            (marks / "died").touch(exist_ok=False)
        except FileExistsError:
            return
        assert writer.temp.stat().st_size > writer.size // 4
        os.kill(os.getpid(), signal.SIGKILL)

    return step
