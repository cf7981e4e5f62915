"""Dequantizing one matrix, on one core, against transformers' own code.

    python packages/modelopt-v4-patches/benchmarks/dequant.py --rounds 9

An expert matrix of DeepSeek-V4-Pro (MXFP4, 3072x7168) and its wq_a (FP8, 1536x7168). The two
results are compared bit for bit first. Rounds alternate, so that a slow phase of the machine hits
both. Bound: 4 times as fast as the look-up in a table (experts) or the cast and product in
float32 (FP8) that transformers does. Prints JSON; exit code 1 if the bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor

from nvfp4_codec import dequantize_fp8_block, dequantize_mxfp4
from nvfp4_codec.backends import available

BOUND = 4.0
BF16_BYTES = 2


def expert() -> tuple[Tensor, Tensor]:
    """Codes int8 [3072, 3584] and scales E8M0 [3072, 224]."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (3072, 3584), dtype=torch.int8, generator=generator)
    scale = torch.randint(113, 123, (3072, 224), dtype=torch.uint8, generator=generator)
    return codes, scale.view(torch.float8_e8m0fnu)


def attention() -> tuple[Tensor, Tensor]:
    """E4M3 [1536, 7168] and scales E8M0 [12, 56]."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1536, 7168, generator=generator).mul_(64).to(torch.float8_e4m3fn)
    scale = torch.randint(107, 117, (12, 56), dtype=torch.uint8, generator=generator)
    return weight, scale.view(torch.float8_e8m0fnu)


def transformers_call() -> Callable[[Tensor, Tensor], Tensor]:
    """What ``FineGrainedFP8Config(dequantize=True)`` runs for each matrix."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    operation: Any = Fp8Dequantize(None)
    return lambda weight, scale: operation._dequantize_one(weight, scale, torch.bfloat16)


def our_expert(weight: Tensor, scale: Tensor) -> Tensor:
    return dequantize_mxfp4(weight.view(torch.uint8), scale, dtype=torch.bfloat16)


def our_attention(weight: Tensor, scale: Tensor) -> Tensor:
    return dequantize_fp8_block(weight, scale, dtype=torch.bfloat16)


def measured(
    ours: Callable[[Tensor, Tensor], Tensor],
    theirs: Callable[[Tensor, Tensor], Tensor],
    matrix: tuple[Tensor, Tensor],
    rounds: int,
) -> dict[str, Any]:
    made, expected = ours(*matrix), theirs(*matrix)
    assert torch.equal(made.view(torch.int16), expected.view(torch.int16))
    values = made.numel()
    calls = {"ours": ours, "transformers": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    del made, expected
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call(*matrix)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["transformers"], strict=True)]
    return {
        "values": values,
        "median_seconds": medians,
        "best_seconds": {name: min(found) for name, found in seconds.items()},
        "ours_gb_per_s_written": values * BF16_BYTES / medians["ours"] / 1e9,
        "times_as_fast": statistics.median(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    theirs = transformers_call()
    matrices = {
        "expert_mxfp4": measured(our_expert, theirs, expert(), rounds),
        "attention_fp8": measured(our_attention, theirs, attention(), rounds),
    }
    reached: float = min(found["times_as_fast"] for found in matrices.values())
    result = {
        "benchmark": "dequantize one matrix on one core, against transformers",
        "backend_native": available()["native"] or "available",
        "load_before": load,
        "cpus": os.cpu_count(),
        "rounds": rounds,
        "matrices": matrices,
        "bound": BOUND,
        "met": reached >= BOUND,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0 if reached >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
