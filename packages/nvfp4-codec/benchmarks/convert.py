"""``nvfp4 convert`` of an MXFP4 file against cp + fsync of the same bytes.

    python packages/nvfp4-codec/benchmarks/convert.py --gib 4 --rounds 7

Bound: 1.3 times. The two alternate, so that a slow phase of the machine hits both; the input
is in the page cache for both (or, with --cold, dropped from it before each). The clock is wall
time of the whole process, start-up included. The result is verified first: codes verbatim,
scales equal to nvfp4_codec.mxfp4_to_nvfp4. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nvfp4_codec.checkpoint.header import TensorSpec, build_header
from nvfp4_codec.checkpoint.reader import Checkpoint

ROWS, COLUMNS = 3072, 7168  # an expert matrix of DeepSeek-V4
BOUND = 1.3


def write_input(path: Path, nbytes: int) -> int:
    """Pairs w1/w3 and a w2 per expert until the file has ``nbytes``; returns its size."""
    rng = np.random.default_rng(0)
    specs = []
    while sum(spec.nbytes for spec in specs) < nbytes:
        expert = len(specs) // 6
        for name in ("w1", "w3", "w2"):
            base = f"layers.0.ffn.experts.{expert}.{name}"
            specs.append(TensorSpec(f"{base}.weight", "I8", (ROWS, COLUMNS // 2)))
            specs.append(TensorSpec(f"{base}.scale", "F8_E8M0", (ROWS, COLUMNS // 32)))
    header, ranges = build_header(specs)
    codes = rng.integers(0, 256, ROWS * COLUMNS // 2, dtype=np.uint8)
    scales = rng.integers(113, 123, ROWS * COLUMNS // 32, dtype=np.uint8)
    with path.open("wb") as file:
        file.write(header)
        for name, (begin, _) in sorted(ranges.items(), key=lambda item: item[1]):
            assert file.tell() == begin
            file.write(memoryview(codes if name.endswith("weight") else scales))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def run_convert(source: Path, output: Path) -> None:
    command = [sys.executable, "-m", "nvfp4_codec.cli", "convert", str(source), str(output)]
    # As an installed package runs: with compiled bytecode.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(
        [*command, "--to", "nvfp4"], check=True, stdout=subprocess.DEVNULL, env=environment
    )


def run_cp(source: Path, output: Path) -> None:
    # Plain cp: it copies inside the kernel, as convert does. (Not on a file system with reflinks.)
    subprocess.run(["cp", str(source), str(output)], check=True)
    fd = os.open(output, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def verify(source: Path, output: Path) -> int:
    """Compares every code byte and every scale; returns the number of tensors checked."""
    import torch

    from nvfp4_codec import mxfp4_to_nvfp4

    with Checkpoint.open(source) as a, Checkpoint.open(output) as b:
        names = [name for name in a.tensors if name.endswith(".weight")]
        for name in names:
            assert np.array_equal(a.read(name), b.read(name)), name
            scale = a.tensor(name.replace(".weight", ".scale"))
            made = mxfp4_to_nvfp4(a.tensor(name), scale)
            found = b.tensor(f"{name}_scale").view(torch.uint8)
            assert torch.equal(found, made.weight_scale.view(torch.uint8)), name
            assert torch.equal(b.tensor(f"{name}_scale_2"), made.weight_scale_2), name
    return len(names)


def timed(action: object, source: Path, output: Path, cold: bool) -> float:
    assert callable(action)
    fd = os.open(source, os.O_RDONLY)
    advice = os.POSIX_FADV_DONTNEED if cold else os.POSIX_FADV_WILLNEED
    os.posix_fadvise(fd, 0, 0, advice)
    if not cold:  # really read it: WILLNEED is only a hint
        buffer = bytearray(1 << 24)
        while os.readv(fd, [buffer]):
            pass
    os.close(fd)
    os.sync()
    start = time.perf_counter()
    action(source, output)
    seconds = time.perf_counter() - start
    output.unlink()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source, output = folder / "mxfp4.safetensors", folder / "out.safetensors"
        size = write_input(source, int(arguments.gib * 2**30))
        run_convert(source, output)
        checked = verify(source, output)
        output_size = output.stat().st_size
        output.unlink()
        times: dict[str, list[float]] = {"cp_fsync": [], "convert": []}
        for _ in range(arguments.rounds):
            times["cp_fsync"].append(timed(run_cp, source, output, arguments.cold))
            times["convert"].append(timed(run_convert, source, output, arguments.cold))
    ratios = [c / p for c, p in zip(times["convert"], times["cp_fsync"], strict=True)]
    result = {
        "benchmark": "nvfp4 convert, MXFP4 to NVFP4, against cp + fsync",
        "tensors_verified": checked,
        "input_bytes": size,
        "output_bytes": output_size,
        "cache": "cold" if arguments.cold else "warm",
        "load_before": os.getloadavg()[0],
        "cpus": os.cpu_count(),
        "seconds": {key: [round(value, 3) for value in values] for key, values in times.items()},
        "median_seconds": {key: statistics.median(values) for key, values in times.items()},
        "ratio_of_medians": statistics.median(times["convert"])
        / statistics.median(times["cp_fsync"]),
        "median_ratio": statistics.median(ratios),
        "bound": BOUND,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
