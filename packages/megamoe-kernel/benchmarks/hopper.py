"""The Hopper kernel's time by number of tokens, next to what the GPU can do at most.

    python packages/megamoe-kernel/benchmarks/hopper.py --tokens 1 8 64 256 1024 4096

One rank's 48 experts of DeepSeek-V4-Pro, hidden 7168, intermediate 3072, top-6. Timed: from routed
BF16 input and top-k ids to combined BF16 output. Each graph holds four launches with four routings,
over weights far larger than the L2 cache. Everything, ours, the others and the ceilings, is timed
alike: the median of five bursts of 40 ms, each after a pause, because after some 50 ms of products
the GPU's power lowers its clock. The ceilings: copy rate (read + write) and the BF16 matmul rate at
8192. From 256 tokens on ours and the matmul rate are also held for 0.4 s. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peers import Layer, measure, with_one_scale
from plot import draw_report
from torch import Tensor

from megamoe_kernel import (
    SymmBuffer,
    get_symm_buffer_for_nvfp4_mega_moe,
    prepare_inputs,
    transform_nvfp4_weights_for_mega_moe,
)
from megamoe_kernel.models import MoEShape
from megamoe_kernel.sm90_kernel import Tiling, all_tilings, run_sm90_layer, tiling_for
from megamoe_kernel.verify.cases import PRO, random_weights, spread

ROUTINGS = 4
BURSTS, BURST_MS, PAUSE_S = 5, 40, 0.3
HELD_FROM, HELD_BURSTS, HELD_MS = 256, 2, 400  # from so many tokens on
DEVICE = torch.device("cuda", 0)


def microseconds(
    launches: list[Callable[[], object]],
    bursts: int = BURSTS,
    milliseconds: float = BURST_MS,
    replays: int | None = None,
) -> list[float]:
    """Of one launch, in each burst: so long, or so often, a graph of all launches is replayed."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    if replays is None:
        replays = max(1, round(1000 * milliseconds / len(launches) / _replayed(graph, launches, 1)))
    return [_replayed(graph, launches, replays) for _ in range(bursts)]


def _replayed(graph: torch.cuda.CUDAGraph, launches: list[Any], replays: int) -> float:
    torch.cuda.synchronize()
    time.sleep(PAUSE_S)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(end) / replays / len(launches)


def ceilings() -> dict[str, float]:
    """Copy rate in GB/s, read and written bytes, and the BF16 matmul rate in TFLOP/s."""
    source = torch.randint(0, 1 << 60, (1 << 28,), dtype=torch.int64, device=DEVICE)
    target = torch.empty_like(source)
    # A kernel's copy: in a graph, copy_ goes to the copy engines, which are slower.
    copy = statistics.median(microseconds([lambda: torch.neg(source, out=target)] * 2))
    a, b = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
    products = [lambda: torch.mm(a, b)] * 4
    flops = 2 * 8192**3
    return {
        "copy_gb_s": 2 * source.nbytes / copy / 1e3,
        "bf16_tflops": flops / statistics.median(microseconds(products)) / 1e6,
        "held_bf16_tflops": flops / _held(products) / 1e6,
    }


def _held(launches: list[Callable[[], object]]) -> float:
    return statistics.median(microseconds(launches, HELD_BURSTS, HELD_MS))


class Problem:
    """A number of tokens with its routings, each in a buffer of its own."""

    def __init__(self, shape: MoEShape, tokens: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(tokens)
        self.tokens = tokens
        self.x = torch.randn(tokens, shape.hidden, generator=generator, device=DEVICE).bfloat16()
        self.ids = [spread(shape, tokens, generator) for _ in range(ROUTINGS)]
        size = (tokens, shape.num_topk)
        self.weights = torch.rand(size, generator=generator, device=DEVICE) + 0.1
        self.y = torch.empty_like(self.x)
        self.buffer: SymmBuffer = get_symm_buffer_for_nvfp4_mega_moe(
            num_experts=shape.num_experts, num_max_tokens_per_rank=tokens,
            num_topk=shape.num_topk, hidden=shape.hidden, intermediate=shape.intermediate,
            activation="bf16", device=DEVICE,
        )  # fmt: skip
        self.touched = statistics.mean(len(ids.unique()) for ids in self.ids)


def ours(problem: Problem, l1: Any, l2: Any, tiling: Tiling | None) -> list[Callable[[], object]]:
    def launch(ids: Tensor) -> Callable[[], object]:
        def run() -> None:
            prepare_inputs(problem.x, problem.buffer, topk_idx=ids, topk_weights=problem.weights)
            run_sm90_layer(problem.y, l1, l2, problem.buffer, swiglu_limit=10.0, tiling=tiling)

        return run

    return [launch(ids) for ids in problem.ids]


def floors(shape: MoEShape, problem: Problem, ceiling: dict[str, float]) -> dict[str, float]:
    """Microseconds that the touched weights and scales take at the copy rate, and the products."""
    values = 3 * shape.hidden * shape.intermediate
    nbytes = problem.touched * values * 72 / 128
    flops = 2 * values * problem.tokens * shape.num_topk
    return {
        "bandwidth_us": nbytes / ceiling["copy_gb_s"] / 1e3,
        "matmul_us": flops / ceiling["bf16_tflops"] / 1e6,
        "held_matmul_us": flops / ceiling["held_bf16_tflops"] / 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256, 1024, 4096, 8192])
    parser.add_argument("--bursts", type=int, default=BURSTS)
    parser.add_argument("--all-tilings", action="store_true", help="time each tiling")
    parser.add_argument("--peers", action="store_true", help="time the others, those that are here")
    parser.add_argument("--out", type=Path, help="a JSON file, and beside it the picture as SVG")
    arguments = parser.parse_args()
    w13, w2 = random_weights(PRO, DEVICE, 1)
    layer = Layer(with_one_scale(w13), w2, PRO.num_topk, max(arguments.tokens), 10.0)
    l1, l2 = transform_nvfp4_weights_for_mega_moe(layer.w13, w2, arch="sm_90a")
    ceiling = ceilings()
    rows = []
    inputs = {}  # by tokens, for the others, whose ids are int32
    for tokens in arguments.tokens:
        problem = Problem(PRO, tokens)
        inputs[tokens] = [(problem.x, ids.int(), problem.weights) for ids in problem.ids]
        chosen = tiling_for(PRO, tokens)
        tilings = all_tilings() if arguments.all_tilings else (chosen,)
        floor = floors(PRO, problem, ceiling)
        for tiling in tilings:
            launches = ours(problem, l1, l2, tiling)
            times = microseconds(launches, arguments.bursts)
            median = statistics.median(times)
            held = _held(launches) if tokens >= HELD_FROM else None
            rows.append(
                {
                    "tokens": tokens, "block_rows": tiling.block_rows, "chosen": tiling == chosen,
                    "experts": problem.touched, "microseconds": median, "best": min(times),
                    **floor,
                    "of_bandwidth": floor["bandwidth_us"] / median,
                    "of_matmul": floor["matmul_us"] / median,
                    "held_us": held,
                    "of_held_matmul": held and floor["held_matmul_us"] / held,
                    "failure": str(problem.buffer.failure() or ""),
                }
            )  # fmt: skip
            held_text = ""
            if held:
                held_text = f"; held {held:.1f} us, {rows[-1]['of_held_matmul']:.1%}"
            sys.stderr.write(
                f"{tokens:6} tokens, blocks of {tiling.block_rows:3}: {median:8.1f} us, "
                f"{rows[-1]['of_bandwidth']:.1%} of bandwidth, {rows[-1]['of_matmul']:.1%} of "
                f"matmul{held_text} {rows[-1]['failure']}\n"
            )
    others: dict[str, object] = {}
    if arguments.peers:
        timed, missing = measure(layer, inputs, lambda runs: microseconds(runs, arguments.bursts))
        others = {"peers": timed, "missing": missing}
        for row in timed:
            took = f"{row['microseconds']:8.1f} us"
            sys.stderr.write(f"{row['tokens']:6} tokens, {row['name']}: {took}\n")
    result = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "megamoe-kernel": version("megamoe-kernel")},
        "ceilings": ceiling,
        "rows": rows,
        **others,
    }
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
        arguments.out.with_suffix(".svg").write_text(draw_report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
