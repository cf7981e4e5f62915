"""How long kernels take: replays of a CUDA graph, over inputs that the L2 cache cannot hold."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..api import prepare_inputs
from ..buffer import get_symm_buffer_for_nvfp4_mega_moe
from ..models import MoEShape
from .report import Timing

REPLAYS = 30
_BEYOND_CACHE = 256 << 20  # bytes; the largest L2 here is 126 MB


def time_graph(runs: Sequence[Callable[[], None]], replays: int = REPLAYS) -> tuple[float, float]:
    """Microseconds of one run (median over replays), and the spread.

    runs: the same work on different inputs; one graph holds them all.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:  # compiles and loads, which cannot be captured
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(runs))
    times = sorted(times[3:])  # the first ones find clocks low
    median = statistics.median(times)
    tenth = len(times) // 10
    return median, (times[-1 - tenth] - times[tenth]) / median


def time_prepare_inputs(shape: MoEShape, token_counts: Sequence[int]) -> list[Timing]:
    """prepare_inputs of BF16 hidden states to NVFP4."""
    timings = []
    for tokens in token_counts:
        nbytes = tokens * (2 * shape.hidden + shape.hidden // 2 + shape.hidden // 16 + 4)
        sets = min(max(_BEYOND_CACHE // nbytes, 4), 64)
        buffer = get_symm_buffer_for_nvfp4_mega_moe(
            num_experts=shape.num_experts, num_max_tokens_per_rank=tokens,
            num_topk=shape.num_topk, hidden=shape.hidden, intermediate=shape.intermediate,
            activation="nvfp4", device="cuda",
        )  # fmt: skip
        inputs = [
            torch.randn(tokens, shape.hidden, device="cuda").to(torch.bfloat16) for _ in range(sets)
        ]
        runs = [partial(prepare_inputs, x, buffer, backend="kernel") for x in inputs]
        microseconds, spread = time_graph(runs)
        timings.append(
            Timing("prepare_inputs", f"{tokens} tokens", microseconds, spread, nbytes / 1e9)
        )
        buffer.destroy()
    return timings
