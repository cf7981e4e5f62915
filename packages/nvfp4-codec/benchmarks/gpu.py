"""Measure the Triton kernels on one GPU: python benchmarks/gpu.py --out gpu.json [--sweep].

Results are compared with the reference first. Then: the bandwidth of a large copy on the device
(bytes read plus bytes written), and each kernel's bytes in plus bytes out over its time, as a
share of that copy. Times are medians over replays of a CUDA graph that runs the kernel on several
sets of random tensors, together far larger than the L2 cache. Writes JSON; prints markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from nvfp4_codec import quantize_nvfp4, reference, triton_kernels
from nvfp4_codec.scales import PROFILES

MODELOPT = PROFILES["modelopt"]
GLOBAL_SCALE = 0.02 * 6 / 2688  # for normal values of standard deviation 0.02
BLOCK = (128, 128)
TARGETS = {"quantize_nvfp4": 0.75, "dequantize_nvfp4": 0.85}
REPLAYS = 30


@dataclass
class Result:
    operation: str
    shape: tuple[int, int]
    dtype: str
    milliseconds: float
    spread: float  # (90th - 10th percentile) / median
    gigabytes: float  # read plus written, each tensor once
    gigabytes_per_second: float
    share_of_copy: float
    note: str = ""
    launch: dict[str, int] = field(default_factory=dict)


@dataclass
class Tensors:
    """One set: values, their NVFP4, MXFP4 and FP8-block forms, and somewhere to decode to."""

    x: Tensor
    weight: Tensor
    weight_scale: Tensor
    mx_scale: Tensor
    fp8: Tensor
    fp8_scale: Tensor
    out: Tensor


def make_tensors(rows: int, k: int, dtype: torch.dtype) -> Tensors:
    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    x = torch.empty((rows, k), dtype=dtype, device="cuda").normal_(0, 0.02)
    fp8_scale = torch.rand(-(-rows // 128), -(-k // 128), device="cuda") + 0.5
    tensors = Tensors(
        x,
        empty(rows, k // 2),
        empty(rows, k // 16),
        empty(rows, k // 32),
        torch.randint(0, 0x7F, (rows, k), dtype=torch.uint8, device="cuda"),
        fp8_scale,
        torch.empty_like(x),
    )
    triton_kernels.quantize_mxfp4(x, "floor", False, tensors.weight, tensors.mx_scale)
    triton_kernels.quantize_nvfp4(
        x, GLOBAL_SCALE, MODELOPT, False, tensors.weight, tensors.weight_scale
    )
    return tensors


def quantize(kernels: Any, t: Tensors) -> None:
    kernels.quantize_nvfp4(t.x, GLOBAL_SCALE, MODELOPT, False, t.weight, t.weight_scale)


def amax(kernels: Any, t: Tensors) -> None:
    kernels.start_amax(t.x)


def amax_and_quantize(kernels: Any, t: Tensors) -> None:
    amax(kernels, t)
    quantize(kernels, t)


def dequantize(kernels: Any, t: Tensors) -> None:
    kernels.dequantize_nvfp4(t.weight, t.weight_scale, GLOBAL_SCALE, False, t.out)


def quantize_mx(kernels: Any, t: Tensors) -> None:
    kernels.quantize_mxfp4(t.x, "floor", False, t.weight, t.mx_scale)


def dequantize_mx(kernels: Any, t: Tensors) -> None:
    kernels.dequantize_mxfp4(t.weight, t.mx_scale, t.out)


def quantize_fp8(kernels: Any, t: Tensors) -> None:
    kernels.quantize_fp8_block(t.x, BLOCK, False, False, t.fp8, t.fp8_scale)


def dequantize_fp8(kernels: Any, t: Tensors) -> None:
    kernels.dequantize_fp8_block(t.fp8, t.fp8_scale, BLOCK, t.out)


def copy(kernels: Any, t: Tensors) -> None:
    t.out.copy_(t.x)


Operation = Callable[[Any, Tensors], None]

# Name: what runs, which tensors its bytes are counted of, what to know about the number.
OPERATIONS: dict[str, tuple[Operation, tuple[str, ...], str]] = {
    "copy": (copy, ("x", "out"), "torch copy_"),
    "amax": (amax, ("x",), "reads only"),
    "quantize_nvfp4": (quantize, ("x", "weight", "weight_scale"), "weight_scale_2 given"),
    "amax + quantize_nvfp4": (
        amax_and_quantize,
        ("x", "weight", "weight_scale"),
        "reads x twice, counted once",
    ),
    "dequantize_nvfp4": (dequantize, ("weight", "weight_scale", "out"), ""),
    "quantize_mxfp4": (quantize_mx, ("x", "weight", "mx_scale"), ""),
    "dequantize_mxfp4": (dequantize_mx, ("weight", "mx_scale", "out"), ""),
    "quantize_fp8_block": (quantize_fp8, ("x", "fp8", "fp8_scale"), "fp32 scales"),
    "dequantize_fp8_block": (dequantize_fp8, ("fp8", "fp8_scale", "out"), "fp32 scales"),
}


def time_graph(operation: Operation, sets: list[Tensors]) -> tuple[float, float]:
    """Median milliseconds for one set, and the spread of the replays."""
    for tensors in sets:
        operation(triton_kernels, tensors)  # compiles, outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensors in sets:
            operation(triton_kernels, tensors)
    times = []
    for replay in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 3:
            times.append(start.elapsed_time(end) / len(sets))
    cuts = statistics.quantiles(times, n=10)
    median = statistics.median(times)
    return median, (cuts[-1] - cuts[0]) / median


def measure(
    name: str, sets: list[Tensors], copy_rate: float, launch: dict[str, int] | None = None
) -> Result:
    operation, counted, note = OPERATIONS[name]
    milliseconds, spread = time_graph(operation, sets)
    size = sum(getattr(sets[0], tensor).nbytes for tensor in counted) / 1e9
    rate = size / milliseconds * 1e3
    return Result(
        name,
        (sets[0].x.shape[0], sets[0].x.shape[1]),
        str(sets[0].x.dtype).removeprefix("torch."),
        milliseconds,
        spread,
        size,
        rate,
        rate / (copy_rate or rate),
        note,
        launch or {},
    )


def verify() -> int:
    """Compare every operation with the reference on the CPU; return the bytes compared."""
    compared = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        t = make_tensors(300, 1152, dtype)
        host = Tensors(**{name: tensor.cpu() for name, tensor in vars(t).items()})
        checks: list[tuple[Operation, tuple[str, ...]]] = [
            (quantize, ("weight", "weight_scale")),
            (dequantize, ("out",)),
            (quantize_fp8, ("fp8", "fp8_scale")),
            (dequantize_fp8, ("out",)),
            (quantize_mx, ("weight", "mx_scale")),
            (dequantize_mx, ("out",)),
        ]
        for operation, outputs in checks:
            for name in outputs:
                getattr(t, name).view(torch.uint8).fill_(0xAA)
            operation(triton_kernels, t)
            operation(reference, host)
            for name in outputs:
                actual = getattr(t, name).cpu().view(torch.uint8)
                wanted = getattr(host, name).view(torch.uint8)
                if not torch.equal(actual, wanted):
                    raise SystemExit(f"{operation.__name__} {dtype}: {name} differs: no timing")
                compared += wanted.numel()
    return compared


SWEPT = {
    "quantize_nvfp4": ("QUANTIZE_NVFP4", [(w, u) for w in (1, 2, 4, 8) for u in (1, 2, 4)]),
    "dequantize_nvfp4": ("DEQUANTIZE_E2M1", [(w, u) for w in (2, 4, 8, 16) for u in (1, 2, 4, 8)]),
    "quantize_mxfp4": ("QUANTIZE_MXFP4", [(w, 1) for w in (1, 2, 4, 8)]),
    "dequantize_fp8_block": (
        "DEQUANTIZE_E4M3",
        [(w, u) for w in (2, 4, 8) for u in (1, 2, 4, 8) if w * u <= 32],
    ),
}


def sweep(sets: list[Tensors], copy_rate: float) -> list[Result]:
    """Every launch shape of SWEPT; the module's own is kept, so the best is set by hand."""
    results = []
    for operation, (name, shapes) in SWEPT.items():
        fixed = getattr(triton_kernels, name)
        for num_warps, unroll in shapes:
            launch = triton_kernels.Launch(num_warps, unroll)
            setattr(triton_kernels, name, launch)
            results.append(measure(operation, sets, copy_rate, asdict(launch)))
        setattr(triton_kernels, name, fixed)
    return results


def wall_milliseconds(function: Callable[[], Any], repeats: int = 10) -> float:
    function()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def whole_calls(t: Tensors) -> dict[str, float]:
    """Wall milliseconds of whole calls: the public function, and the reference on the GPU."""
    out = (t.weight, t.weight_scale.view(torch.float8_e4m3fn))
    return {
        "quantize_nvfp4(x, out=out)": wall_milliseconds(lambda: quantize_nvfp4(t.x, out=out)),
        "reference quantize on the GPU": wall_milliseconds(lambda: quantize(reference, t), 3),
        "reference dequantize on the GPU": wall_milliseconds(lambda: dequantize(reference, t), 3),
    }


def clocks() -> str:
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"


def table(results: list[Result]) -> str:
    lines = ["| operation | dtype | shape | launch | ms | spread | GB/s | of copy | |"]
    lines.append("|" + "---|" * 9)
    for r in results:
        target = TARGETS.get(r.operation) if r.dtype == "bfloat16" else None
        verdict = "" if target is None else ("reached" if r.share_of_copy >= target else "MISSED")
        launch = "x".join(str(value) for value in r.launch.values())
        lines.append(
            f"| {r.operation} | {r.dtype} | {r.shape[0]}x{r.shape[1]} | {launch} "
            f"| {r.milliseconds:.4f} | {r.spread:.1%} | {r.gigabytes_per_second:.0f} "
            f"| {r.share_of_copy:.1%} | {' '.join(filter(None, (r.note, verdict)))} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="also time other launch shapes")
    arguments = parser.parse_args()

    print(f"verified {verify()} bytes against the reference", flush=True)
    sets = [make_tensors(16384, 7168, torch.bfloat16) for _ in range(4)]
    large = [make_tensors(65536, 14336, torch.bfloat16) for _ in range(2)]
    copy_result = measure("copy", large, 0.0)
    rate = copy_result.gigabytes_per_second
    results = [copy_result]
    state = []
    for tensors in (sets, large):
        results += [measure(name, tensors, rate) for name in OPERATIONS if name != "copy"]
        state.append(clocks())  # right after the load
    del large
    for dtype in (torch.float16, torch.float32):
        others = [make_tensors(16384, 7168, dtype) for _ in range(4)]
        results += [
            measure(name, others, rate) for name in OPERATIONS if name.endswith("quantize_nvfp4")
        ]
    calls = whole_calls(sets[0])
    swept = sweep(sets, rate) if arguments.sweep else []
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "after_load": state,
        "results": [asdict(result) for result in results],
        "whole_calls_wall_ms": calls,
        "sweep": [asdict(result) for result in swept],
    }
    arguments.out.write_text(json.dumps(report, indent=1))
    print(f"{report['device']}, torch {report['torch']}, triton {report['triton']}")
    print(f"clocks after load (SM, memory, power, temperature, driver): {'; '.join(state)}\n")
    if swept:
        print(table(swept), end="\n\n")
    print(table(results), end="\n\n")
    for name, milliseconds in calls.items():
        print(f"{name}: {milliseconds:.3f} ms wall, {sets[0].x.shape[0]}x{sets[0].x.shape[1]}")


if __name__ == "__main__":
    main()
