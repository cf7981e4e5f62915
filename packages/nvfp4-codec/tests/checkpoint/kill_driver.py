"""Runs a job in forked processes and kills each with SIGKILL at a random point of its writing.

Arguments: quantize or convert, input, folder for the outputs killed-0, killed-1, ..., number
of kills, seed. Forking from a process that has imported everything makes 50 kills cheap.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from nvfp4_codec.checkpoint import (
    Checkpoint,
    ConvertOptions,
    QuantizeOptions,
    convert_checkpoint,
    quantize_checkpoint,
)


def run(command: str, path: Path, output: Path, pipe: int) -> None:
    def report(step: str) -> None:
        os.write(pipe, b".")
        time.sleep(0.0005)

    with Checkpoint.open(path) as source:
        if command == "quantize":
            quantize_checkpoint(source, output, QuantizeOptions(), fault=report)
        else:
            convert_checkpoint(source, output, ConvertOptions("nvfp4"), fault=report)


def main() -> None:
    command, path, folder, count, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    for i in range(int(count)):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            run(command, Path(path), Path(folder) / f"killed-{i}", writing)
            os._exit(0)
        os.close(writing)
        for _ in range(rng.randint(1, 45)):
            if not os.read(reading, 1):
                break
        time.sleep(rng.random() * 0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


if __name__ == "__main__":
    main()
