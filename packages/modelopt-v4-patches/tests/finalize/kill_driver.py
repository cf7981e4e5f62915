"""Finalizes folders in place in forked processes and kills each at a random point of its writing.

Arguments: the reference's folder, a seed, the folders. Prints each child's exit code. Forking
from a process that has imported everything makes many kills cheap.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from modelopt_v4_patches.finalize import finalize_checkpoint


def run(folder: Path, reference: Path, pipe: int) -> None:
    def report(step: str) -> None:
        os.write(pipe, b".")
        time.sleep(0.0005)

    finalize_checkpoint(folder, None, reference_config=reference, in_place=True, fault=report)
    time.sleep(10)


def main() -> None:
    reference, seed, *folders = sys.argv[1:]
    rng = random.Random(int(seed))
    for folder in folders:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            run(Path(folder), Path(reference), writing)
            os._exit(0)
        os.close(writing)
        for _ in range(rng.randint(1, 30)):
            if not os.read(reading, 1):
                break
        time.sleep(rng.random() * 0.001)
        os.kill(child, 9)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        os.close(reading)


if __name__ == "__main__":
    main()
