"""Runs `prepare` in forked processes and kills each with SIGKILL at a random point of its writing.

Arguments: source, folder for the outputs killed-0, killed-1, ..., number of kills, seed. Forking
from a process that has prepared once, and so imported everything, makes kills cheap.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from vllm_dsv4.prepare import prepare_checkpoint


def prepare(source: Path, output: Path, pipe: int) -> None:
    def report(step: str) -> None:
        os.write(pipe, b".")
        time.sleep(0.0005)

    prepare_checkpoint(source, output, fault=report)


def main() -> None:
    source, folder, count, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    steps: list[str] = []
    prepare_checkpoint(Path(source), Path(folder) / "whole", fault=steps.append)
    for i in range(int(count)):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            prepare(Path(source), Path(folder) / f"killed-{i}", writing)
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
