"""Time the compilation of a DeepSeek-V4-Pro layer's kernels and measure its memory; prints JSON.

Each kernel is compiled in a process of its own, without a cache, for each target: its seconds and
the peak of its resident memory, torch's import included, are held against the bounds, which are for
two cores that nothing else uses. "seconds" is the wall clock, "cpu_seconds" counts all threads.
Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megamoe_kernel.jit.compile import KernelSource
    from megamoe_kernel.reference import Activation

BOUND_SECONDS = 15.0
BOUND_BYTES = 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-v4-pro")
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--arch", nargs="+", default=["sm_90a", "sm_100a", "sm_100f", "sm_103a"])
    parser.add_argument("--kernel", type=int, help=argparse.SUPPRESS)  # what a child compiles
    arguments = parser.parse_args()
    if arguments.kernel is not None:
        print(json.dumps(_compile(arguments, arguments.arch[0], arguments.kernel)))
        return 0
    rows = []
    for arch in arguments.arch:
        for number, _ in enumerate(_sources(arguments, arch)):
            words = [f"--model={arguments.model}", f"--ep={arguments.ep}", f"--arch={arch}"]
            command = [sys.executable, __file__, *words, f"--kernel={number}"]
            child = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            rows.append(json.loads(child.stdout))
    met = all(row["seconds"] <= BOUND_SECONDS and row["bytes"] <= BOUND_BYTES for row in rows)
    report = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "bounds": {"seconds": BOUND_SECONDS, "bytes": BOUND_BYTES},
        "met": met,
        "kernels": rows,
    }
    print(json.dumps(report, indent=1))
    return 0 if met else 1


def _sources(arguments: argparse.Namespace, arch: str) -> list[KernelSource]:
    """What precompile would compile, and the composed layer without tensor cores."""
    from megamoe_kernel.jit.targets import check_target
    from megamoe_kernel.kernels import kernels_of
    from megamoe_kernel.models import MODELS
    from megamoe_kernel.scalar_kernel import scalar_source

    shape = MODELS[arguments.model]
    activation: Activation = "bf16" if arch == "sm_90a" else "nvfp4"
    layer = scalar_source(shape, activation, arguments.ep, 32768)
    return [*kernels_of(shape, arguments.ep, check_target(arch)), layer]


def _compile(arguments: argparse.Namespace, arch: str, number: int) -> dict[str, object]:
    from megamoe_kernel.jit.cache import CubinCache
    from megamoe_kernel.jit.compile import compile_kernel
    from megamoe_kernel.jit.cubin import read_cubin
    from megamoe_kernel.jit.targets import check_target

    source = _sources(arguments, arch)[number]
    with tempfile.TemporaryDirectory() as folder:
        cpu = time.process_time()
        compiled = compile_kernel(source, check_target(arch), cache=CubinCache(Path(folder) / "c"))
        cpu = time.process_time() - cpu
    if source.name not in read_cubin(compiled.cubin).kernels:
        raise SystemExit(f"{source.name} is not in its cubin")
    return {
        "kernel": source.name,
        "target": arch,
        "seconds": round(compiled.seconds, 3),
        "cpu_seconds": round(cpu, 3),
        "bytes": _peak(),
        "cubin_bytes": len(compiled.cubin),
    }


def _peak() -> int:
    """Of this process's own image: ru_maxrss begins with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


if __name__ == "__main__":
    raise SystemExit(main())
