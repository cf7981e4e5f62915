"""Processes of this machine: results, errors, and deaths of both sides."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from modelopt_v4_patches.errors import ExecutorError
from modelopt_v4_patches.executor import LocalProcesses, make_executor, spread_with
from nvfp4_codec.checkpoint.job import PLAN_NAME
from nvfp4_codec.errors import CheckpointError


def tree(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_results_of_two_processes(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = list(LocalProcesses(2).map(tasks.square, range(8)))
    assert sorted(result for result, _, _ in found) == [i * i for i in range(8)]
    processes = {process for _, process, _ in found}
    assert len(processes) == 2
    assert os.getpid() not in processes
    cores = len(os.sched_getaffinity(0))
    assert {threads for _, _, threads in found} == {str(max(1, cores // 2))}


@pytest.mark.parametrize("items", [range(0), range(1), range(3)], ids=len)
def test_one_worker_is_this_process(tasks: Any, items: range) -> None:
    workers = 1 if len(items) > 1 else 4
    found = list(LocalProcesses(workers).map(tasks.square, items))
    assert [result for result, _, _ in found] == [i * i for i in items]
    assert {process for _, process, _ in found} <= {os.getpid()}
    assert spread_with(LocalProcesses(1), lambda: pytest.fail("not called")) is None


def test_an_exception_arrives_as_it_was_raised(tasks: Any) -> None:
    with pytest.raises(CheckpointError, match="file a, tensor b: is broken.") as caught:
        list(LocalProcesses(2).map(tasks.fail, [3, 4]))
    assert (caught.value.file, caught.value.tensor) == ("a", "b")
    assert "tasks.py" in "".join(caught.value.__notes__)
    with pytest.raises(ExecutorError, match="5: StubbornError: 1 and 2"):
        list(LocalProcesses(2).map(tasks.fail, [5, 6]))


def test_a_dead_worker_is_named_with_its_task(tasks: Any) -> None:
    with pytest.raises(ExecutorError, match=r"shard-2: .*signal 9 \(out of memory\?\).*--resume"):
        list(LocalProcesses(2).map(tasks.die, ["shard-1", "shard-2", "shard-4"]))
    with pytest.raises(ExecutorError, match=r"shard-3: .*exit code 7"):
        list(LocalProcesses(2).map(tasks.die, ["shard-3", "shard-4"]))


def test_a_worker_that_dies_in_the_middle_of_a_shard(
    tasks: Any, source: Path, tmp_path: Path
) -> None:
    tasks.run_job(partial(tasks.make_job, source), tmp_path / "clean")
    make, output = partial(tasks.make_job, source, tmp_path), tmp_path / "out"
    with pytest.raises(ExecutorError, match="model-00002-of-00005.safetensors: .*--resume"):
        tasks.run_job(make, output, LocalProcesses(2))
    assert (output / PLAN_NAME).exists()
    assert not (output / "model-00002-of-00005.safetensors").exists()
    outcome = tasks.run_job(make, output, LocalProcesses(2), resume=True)
    assert "model-00002-of-00005.safetensors" in outcome.written
    assert tree(output) == tree(tmp_path / "clean")


@pytest.mark.usefixtures("tasks")
def test_workers_end_when_the_main_process_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from functools import partial; from pathlib import Path; import tasks\n"
        "from modelopt_v4_patches.executor import LocalProcesses\n"
        "if __name__ == '__main__':\n"
        "    list(LocalProcesses(2).map(partial(tasks.wait_for_ever, Path(sys.argv[1])), [1, 2]))"
    )
    program = tmp_path / "program.py"
    program.write_text(script)
    marks = tmp_path / "marks"
    marks.mkdir()
    main = subprocess.Popen(
        [sys.executable, program, marks],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        until(lambda: len(list(marks.iterdir())) == 2)
    finally:
        main.send_signal(signal.SIGKILL)
        main.wait()
    workers = [int(path.name.split("-")[1]) for path in marks.iterdir()]
    assert len(workers) == 2
    until(lambda: not any(alive(worker) for worker in workers))


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def until(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_command_lines_choices() -> None:
    assert make_executor("local", 3) == LocalProcesses(3)
    assert type(make_executor("ray")).__name__ == "RayExecutor"
