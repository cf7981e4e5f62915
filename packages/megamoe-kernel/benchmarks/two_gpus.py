"""Two GPUs of one host: how much of the traffic between them hides behind the products.

    python packages/megamoe-kernel/benchmarks/two_gpus.py --tokens 64 256 1024 4096

Two ranks with 48 experts each, sizes of DeepSeek-V4-Pro (hidden 7168, intermediate 3072, top-6).
Three times for each number of tokens of a rank; medians of CUDA-graph replays, of the slower rank:

layer    from routed BF16 input to combined output; half of the slots, drawn at random, want an
         expert of the other rank
compute  the same kernel with as many rows for each expert, all of them the rank's own tokens
traffic  the bytes that cross, alone: rows in, then results out, both directions at once, each by
         one kernel that copies rows that lie one behind another; no gather is faster

hidden is (compute + traffic - layer) / traffic, the share of the traffic that costs no time. As no
traffic is faster than this one, it is rather too small than too large. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hopper import ROUTINGS, ceilings, microseconds, ours
from torch import Tensor

from megamoe_kernel import (
    get_symm_buffer_for_nvfp4_mega_moe,
    transform_nvfp4_weights_for_mega_moe,
)
from megamoe_kernel.buffer_sizes import MOST_RING_ROWS
from megamoe_kernel.jit.compile import compile_kernel
from megamoe_kernel.models import MoEShape
from megamoe_kernel.nvlink import meet
from megamoe_kernel.sm90_kernel import sm90_source, tiling_for
from megamoe_kernel.verify.cases import PRO, random_weights, spread
from megamoe_kernel.verify.ranks import join, run_processes

RANKS = 2
SHAPE = replace(PRO, num_experts=RANKS * PRO.num_experts)
ROW_BYTES = 2 * SHAPE.hidden


def routings(
    shape: MoEShape, tokens: int, generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor], int]:
    """Each rank's expert ids, all local, and with slots that cross; how many cross each way.

    Half of the slots, at random, change places with the same slots of the other rank: every expert
    keeps its number of rows, and no token meets an expert twice.
    """
    local = replace(shape, num_experts=shape.num_experts // RANKS)
    own = [spread(local, tokens, generator) + rank * local.num_experts for rank in range(RANKS)]
    swapped = torch.rand(own[0].shape, generator=generator) < 0.5
    crossing = [torch.where(swapped, theirs, mine) for mine, theirs in (own, own[::-1])]
    return own, crossing, int(swapped.sum())


class Rank:
    """One of the two: its experts, its buffer, and memory for the traffic alone."""

    def __init__(self, most: int, rounds: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.group, self.device = join()
        self.idx, self.rounds = self.group.rank(), rounds
        weights = random_weights(PRO, self.device, self.idx)
        self.weights = transform_nvfp4_weights_for_mega_moe(*weights, arch="sm_90a")
        self.buffer = get_symm_buffer_for_nvfp4_mega_moe(
            self.group, num_experts=SHAPE.num_experts, num_max_tokens_per_rank=most,
            num_topk=SHAPE.num_topk, hidden=SHAPE.hidden, intermediate=SHAPE.intermediate,
            activation="bf16", device=self.device, ring_rows=MOST_RING_ROWS,
        )  # fmt: skip
        # Rows to take, and rows to be written; words of 8 bytes, which a kernel copies fast.
        size = (2, most * SHAPE.num_topk, ROW_BYTES // 8)
        self.memory = symmetric.empty(*size, dtype=torch.int64, device=self.device)
        self.memory.random_()
        self.mapped = symmetric.rendezvous(self.memory, self.group)
        self.theirs = self.mapped.get_buffer(1 - self.idx, size, torch.int64)
        self.ring = torch.empty(size[1:], dtype=torch.int64, device=self.device)

    def slower(self, launches: list[Callable[[], object]]) -> float:
        """Median microseconds of a launch, on the rank that takes longer."""
        meet(self.group)
        median = statistics.median(microseconds(launches, replays=self.rounds))
        medians: list[Any] = [None] * RANKS
        dist.all_gather_object(medians, median, group=self.group)
        return max(medians)

    def layers(self, tokens: int, ids: Sequence[list[Tensor]]) -> list[Callable[[], object]]:
        """Launches on random tokens, with each of the routings of both ranks."""
        x = torch.randn(tokens, SHAPE.hidden, device=self.device).bfloat16()
        problem: Any = SimpleNamespace(
            x=x, y=torch.empty_like(x), buffer=self.buffer,
            ids=[both[self.idx].to(self.device) for both in ids],
            weights=torch.rand(tokens, SHAPE.num_topk, device=self.device) + 0.1,
        )  # fmt: skip
        return ours(problem, *self.weights, None)

    def traffic(self, rows: Sequence[int]) -> list[Callable[[], object]]:
        """Copies of so many rows in and out; the first of a graph waits for the other rank."""

        def copy(count: int, number: int) -> Callable[[], object]:
            def run() -> None:
                if number == 0:
                    self.mapped.barrier()
                torch.neg(self.theirs[0, :count], out=self.ring[:count])
                torch.neg(self.ring[:count], out=self.theirs[1, :count])

            return run

        return [copy(count, number) for number, count in enumerate(rows)]

    def measure(self, tokens: int) -> dict[str, Any]:
        """All times for so many tokens of each rank."""
        generator = torch.Generator().manual_seed(tokens)  # of the CPU: the same on both ranks
        drawn = [routings(SHAPE, tokens, generator) for _ in range(ROUTINGS)]
        own, crossing, rows = zip(*drawn, strict=True)
        layer = self.slower(self.layers(tokens, crossing))
        compute = self.slower(self.layers(tokens, own))
        traffic = self.slower(self.traffic(rows * ROUTINGS))  # so that the barrier hardly counts
        each_way = 2 * statistics.mean(rows) * ROW_BYTES
        return {
            "tokens_per_rank": tokens, "bytes_each_way": each_way, "layer_us": layer,
            "compute_us": compute, "traffic_us": traffic,
            "traffic_gb_s": each_way / traffic / 1e3,
            "hidden": (compute + traffic - layer) / traffic,
            "failure": str(self.buffer.failure() or ""),
        }  # fmt: skip


def run_rank(tokens: Sequence[int], rounds: int, result: Path) -> None:
    rank = Rank(max(tokens), rounds)
    rows = [rank.measure(count) for count in tokens]
    report = {
        "gpus": f"{RANKS} x {torch.cuda.get_device_name()}",
        "versions": {"torch": torch.__version__, "megamoe-kernel": version("megamoe-kernel")},
        "ceilings": ceilings() if rank.idx == 0 else None,  # of GPU 0
        "rows": rows,
    }
    rank.buffer.destroy()
    dist.destroy_process_group()
    if rank.idx == 0:
        result.write_text(json.dumps(report, indent=1) + "\n")


def compile_all(tokens: Sequence[int]) -> None:
    """Into the cache, side by side, before two ranks compile each for itself."""
    tilings = {tiling_for(SHAPE, RANKS * count) for count in tokens}
    sources = [sm90_source(SHAPE, RANKS, MOST_RING_ROWS, tiling) for tiling in tilings]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: compile_kernel(source, "sm_90a"), sources))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # makes it one rank
    arguments = parser.parse_args()
    if arguments.result is not None:
        run_rank(arguments.tokens, arguments.rounds, arguments.result)
        return 0
    if torch.cuda.device_count() < RANKS:
        parser.error(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    compile_all(arguments.tokens)
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "result.json")
        command = [sys.executable, *sys.argv, "--result", str(result)]
        outputs = run_processes(RANKS, command, Path(scratch))
        if not result.exists():
            sys.exit("\n".join(outputs))
        text = result.read_text()
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
