"""Forks dequantizations and kills each with SIGKILL at a random moment of its run.

Arguments: input, folder for the outputs killed-0, killed-1, ..., number of kills, seed. Every other
one is killed once its plan is there, so that some are sure to be hit at work however busy the
machine is. Forking from a process that has imported everything makes many kills cheap.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from modelopt_v4_patches import dequantize_checkpoint
from nvfp4_codec.checkpoint.job import PLAN_NAME

#: Ask whether a child has ended, and leave it to be waited for.
_STILL_THERE = os.WEXITED | os.WNOHANG | os.WNOWAIT


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
        if i % 2:
            plan = Path(folder) / f"killed-{i}" / PLAN_NAME
            while not plan.exists() and os.waitid(os.P_PID, child, _STILL_THERE) is None:
                time.sleep(1e-4)
            time.sleep(rng.random() * duration / 8 * (i > 1))
        else:
            time.sleep(rng.random() * duration)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
