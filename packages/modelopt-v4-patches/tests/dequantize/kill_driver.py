"""Forks dequantizations and kills each with SIGKILL at a random moment of its run.

Arguments: input, folder for the outputs killed-0, killed-1, ..., number of kills, seed. Forking
from a process that has imported everything makes many kills cheap.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from modelopt_v4_patches import dequantize_checkpoint


def main() -> None:
    source, folder, count, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    dequantize_checkpoint(Path(source), Path(folder) / "clean")  # imports what it needs
    start = time.monotonic()
    dequantize_checkpoint(Path(source), Path(folder) / "timed")
    duration = time.monotonic() - start
    for i in range(int(count)):
        child = os.fork()
        if child == 0:
            dequantize_checkpoint(Path(source), Path(folder) / f"killed-{i}")
            os._exit(0)
        time.sleep(rng.random() * duration)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
