"""The same tasks on a local Ray of two workers, one of which dies in the middle of a shard."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from modelopt_v4_patches.errors import ExecutorError
from modelopt_v4_patches.executor import RayExecutor

# No token in the user's home, no report of usage, and patience where the cores are busy.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_raylet_start_wait_time_s": "300",
}


def tree(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_killed_worker_is_replaced_and_errors_arrive(
    tasks: Any, source: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    tasks.run_job(partial(tasks.make_job, source), tmp_path / "clean")
    driver = str(Path(__file__).with_name("ray_driver.py"))
    done = subprocess.run(
        [sys.executable, driver, str(source), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **QUIET},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])  # Ray prints, too
    assert (tmp_path / "died").exists()
    assert (found["written"], found["notes"]) == (5, 20)
    assert tree(tmp_path / "out") == tree(tmp_path / "clean")
    assert found["error"] == "file a, tensor b: is broken."
    assert re.match(r"7: its worker was lost, 1 in all.*--resume", found["lost"])


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExecutorError, match=r"modelopt-v4-patches\[ray\]"):
        list(RayExecutor().map(str, [1]))
