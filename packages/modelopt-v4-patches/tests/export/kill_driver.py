"""Runs exports in forked processes and kills each with SIGKILL at a random point of its writing.

Arguments: source, snapshot, folder for the outputs killed-0, killed-1, ..., number of kills, seed.
Forking from a process that has exported once, and so imported everything, makes kills cheap.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from modelopt_v4_patches.export import ExportOptions, make_job
from nvfp4_codec.checkpoint.job import run


def export(source: Path, snapshot: Path, output: Path, pipe: int) -> None:
    def report(step: str) -> None:
        os.write(pipe, b".")
        time.sleep(0.0005)

    run(make_job(source, snapshot, ExportOptions()), output, fault=report)


def main() -> None:
    source, snapshot, folder, count, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    steps: list[str] = []
    job = make_job(Path(source), Path(snapshot), ExportOptions())
    run(job, Path(folder) / "whole", fault=steps.append)
    for i in range(int(count)):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            export(Path(source), Path(snapshot), Path(folder) / f"killed-{i}", writing)
            os._exit(0)
        os.close(writing)
        for _ in range(rng.randint(1, len(steps))):
            if not os.read(reading, 1):
                break
        time.sleep(rng.random() * 0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


if __name__ == "__main__":
    main()
