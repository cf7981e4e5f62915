"""Runs a job on a local Ray of two workers; prints what happened as one JSON object.

Arguments: input, folder. A process of its own: Ray leaves processes and warnings behind.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tasks

from modelopt_v4_patches.errors import ExecutorError
from modelopt_v4_patches.executor import RayExecutor
from nvfp4_codec.errors import CheckpointError


def message(kind: type[Exception], run: Callable[[], Iterator[object]]) -> str:
    """What the error of that very kind says."""
    try:
        list(run())
    except kind as error:
        return str(error)
    return ""


def main() -> None:
    source, folder = map(Path, sys.argv[1:])
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    make = partial(tasks.make_job, source, folder)
    outcome = tasks.run_job(make, folder / "out", RayExecutor())
    found = {
        "written": len(outcome.written),
        "notes": len(outcome.notes),
        "error": message(CheckpointError, lambda: RayExecutor().map(tasks.fail, [1, 2, 3])),
        "lost": message(ExecutorError, lambda: RayExecutor(retries=0).map(tasks.die_always, [7])),
    }
    ray.shutdown()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
