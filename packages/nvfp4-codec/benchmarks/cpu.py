"""Measure the native backend against the memory's limit and against installed peers.

    python benchmarks/cpu.py [--shape 16384x7168] [--operations a,b] [--threads 1,2]
                             [--no-peers] [--json cpu.json]

Every row runs in a process of its own. It first checks its result: ours against the
reference, byte for byte, on sampled rows; a peer's against ours (``differs`` is the share of
elements, or bytes, that are not equal: peers have other conventions). Then it reports the
median and the minimum time, and the peak of resident memory above what the inputs and our
preallocated output already held (for a peer, less its output).

The limit of an operation is the time to read the bytes it must read once at the measured
read rate, plus the time to write its output at the measured non-temporal write rate, both
measured in the same process right before and after. Quantize needs the amax before it can
start, so it reads its input twice; the limit still counts it once.

GB/s are bytes of the bfloat16 side per second (elements * 2), so that operations compare.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cpu_cases import OPERATIONS, Setup
from torch import Tensor

from nvfp4_codec import _native, native, reference
from nvfp4_codec.scales import get_profile

OURS = "nvfp4-codec"
SAMPLED_ROWS = 256


def timed(call: Any, *, seconds: float, least: int) -> list[float]:
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < least or (len(times) < 25 and time.perf_counter() - start < seconds):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return times


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def limit_seconds(setup: Setup, bytes_in: float, bytes_out: float) -> tuple[float, float]:
    """Median and minimum time to read and to write what the operation must, and no more."""
    elements = setup.rows * setup.columns
    size = 256 << 20
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    address = -(-memory.data_ptr() // 64) * 64
    reads = timed(
        lambda: _native.bench_read("", setup.threads, address, size), seconds=0.5, least=5
    )
    writes = timed(
        lambda: _native.bench_write("", setup.threads, address, size), seconds=0.5, least=5
    )
    read, write = bytes_in * elements / size, bytes_out * elements / size
    median = statistics.median(reads) * read + statistics.median(writes) * write
    return median, min(reads) * read + min(writes) * write


def verify_ours(name: str, setup: Setup, found: tuple[Tensor, ...]) -> None:
    """Compare sampled rows with the reference, byte for byte."""
    rows = slice(0, min(SAMPLED_ROWS, setup.rows))
    expected = tuple(torch.zeros_like(t[rows]) for t in found)
    if name == "nvfp4_quantize":
        profile = get_profile("modelopt")
        scale_2 = float(profile.global_scale(setup.x.abs().max()))  # type: ignore[arg-type]
        reference.quantize_nvfp4(setup.x[rows], scale_2, profile, False, *expected)
    elif name == "nvfp4_dequantize":
        scale_2 = float(torch.tensor(3.1e-5))
        reference.dequantize_nvfp4(setup.codes[rows], setup.e4m3[rows], scale_2, False, *expected)
    elif name == "mxfp4_dequantize":
        reference.dequantize_mxfp4(setup.codes[rows], setup.e8m0[rows], *expected)
    elif name == "fp8_block_dequantize":
        reference.dequantize_fp8_block(
            setup.fp8[rows],
            setup.fp8_scale[: -(-expected[0].shape[0] // 128)],
            (128, 128),
            *expected,
        )
    else:  # the cast: the same values, and the codes untouched
        decoded, scale_2 = (
            torch.zeros(expected[0].shape[0], setup.columns),
            2.0 ** (int(setup.e8m0.max()) - 8 - 127),
        )
        want = torch.zeros_like(decoded)
        reference.dequantize_mxfp4(setup.codes[rows], setup.e8m0[rows], want)
        reference.dequantize_nvfp4(found[0][rows], found[1][rows], scale_2, False, decoded)
        assert torch.equal(decoded, want)
        return
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[rows].view(torch.uint8), theirs.view(torch.uint8)), name


def child(name: str, who: str, setup: Setup, budget: float) -> dict[str, Any]:
    """One row: verify, then measure."""
    torch.set_num_threads(setup.threads)
    operation = OPERATIONS[name]
    elements = setup.rows * setup.columns
    output_bytes = round(operation.bytes_out * elements)
    call = operation.ours(setup) if who == OURS else operation.peers[who](setup)
    gc.collect()
    resident = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    # On the first call: later ones would find its memory still held by the allocator.
    result = call()
    extra = status_bytes("VmHWM") - resident - (0 if who == OURS else output_bytes)
    differs = 0.0
    if who == OURS:
        verify_ours(name, setup, result)
        before = limit_seconds(setup, operation.bytes_in, operation.bytes_out)
    else:
        pairs = list(zip(result, operation.ours(setup)(), strict=True))
        unequal = sum(int((a.view(b.shape).to(b.dtype) != b).sum()) for a, b in pairs)
        differs = unequal / sum(b.numel() for _, b in pairs)
        del pairs
    del result
    gc.collect()
    times = timed(call, seconds=budget, least=7 if who == OURS else 2)
    median, best = statistics.median(times), min(times)
    row = {
        "operation": name,
        "who": who,
        "threads": setup.threads,
        "runs": len(times),
        "median_s": median,
        "min_s": best,
        "gb_per_s": 2 * elements / median / 1e9,
        "gb_per_s_best": 2 * elements / best / 1e9,
        "differs": differs,
        "extra_memory_of_output": max(0, extra) / output_bytes,
    }
    if who == OURS:
        after = limit_seconds(setup, operation.bytes_in, operation.bytes_out)
        limit, limit_best = (before[0] + after[0]) / 2, min(before[1], after[1])
        row |= {
            "limit_s": limit,
            "limit_best_s": limit_best,
            "share": limit / median,
            "share_best": limit_best / best,
        }
    return row


def spawn(name: str, who: str, shape: str, threads: int, budget: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, who]
    command += ["--shape", shape, "--threads", str(threads), "--budget", str(budget)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"operation": name, "who": who, "threads": threads, "error": reason[0]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table, with every peer's time relative to ours at the same number of threads."""
    head = ("operation", "who", "threads", "GB/s median (best)", "share of limit", "ours is")
    lines = [" | ".join((*head, "extra memory", "differs")), " | ".join(["---"] * 8)]
    ours = {(r["operation"], r["threads"]): r for r in rows if r["who"] == OURS}
    for row in rows:
        cells = [row["operation"], row["who"], str(row["threads"])]
        if "error" in row:
            lines.append(" | ".join([*cells, f"not measured: {row['error']}", "", "", "", ""]))
            continue
        mine = ours.get((row["operation"], row["threads"]), {})
        ratio = row["median_s"] / mine["median_s"] if "median_s" in mine else float("nan")
        share = f"{row['share']:.0%} ({row['share_best']:.0%})" if "share" in row else ""
        lines.append(
            " | ".join(
                [
                    *cells,
                    f"{row['gb_per_s']:.3g} ({row['gb_per_s_best']:.3g})",
                    share,
                    "" if row["who"] == OURS else f"{ratio:.0f}x faster",
                    f"{row['extra_memory_of_output']:.1%}",
                    f"{row['differs']:.2g}",
                ]
            )
        )
    return "\n".join(f"| {line} |" for line in lines)


def machine() -> dict[str, Any]:
    libraries = ("torch", "nvidia-modelopt", "compressed-tensors", "torchao", "ml-dtypes")
    versions = {}
    for library in (*libraries, "transformers"):
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = "absent"
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "isa": native.active_isa(),
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="16384x7168")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--threads", default=f"{len(os.sched_getaffinity(0))},1")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds per row")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rows, columns = map(int, arguments.shape.split("x"))
    if arguments.child:
        setup = Setup(rows, columns, int(arguments.threads))
        sys.stdout.write(json.dumps(child(*arguments.child, setup, arguments.budget)) + "\n")
        return
    found: list[dict[str, Any]] = []
    about = machine()
    threads = [int(count) for count in arguments.threads.split(",")]
    for name in arguments.operations.split(","):
        for count in threads:
            found.append(spawn(name, OURS, arguments.shape, count, arguments.budget))
        if not arguments.no_peers:
            for who in OPERATIONS[name].peers:
                found.append(spawn(name, who, arguments.shape, threads[0], arguments.budget))
        sys.stderr.write(f"{name} done\n")
    if arguments.json:
        result = {"machine": about, "shape": [rows, columns], "rows": found}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(markdown(found) + "\n")


if __name__ == "__main__":
    main()
