"""One of two ranks that miss each other: ``absent_rank.py FOLDER late|dead``.

Both launch; then rank 0 launches alone. Rank 1 launches when rank 0 has given up ("late"), after
which both clear their buffers and go on; or it was killed before ("dead"). What each rank saw is
left in FOLDER/<rank>.json.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megamoe_kernel import (
    get_symm_buffer_for_nvfp4_mega_moe,
    prepare_inputs,
    transform_nvfp4_weights_for_mega_moe,
)
from megamoe_kernel.launch import WAIT_LIMIT
from megamoe_kernel.nvlink import meet
from megamoe_kernel.reference import RankTokens, mega_moe
from megamoe_kernel.sm90_kernel import run_sm90_layer
from megamoe_kernel.verify.cases import TINY, random_weights, spread
from megamoe_kernel.verify.checks import SWIGLU_LIMIT
from megamoe_kernel.verify.ranks import join

TOKENS = (5, 33)  # of the ranks
ALONE = 1_000_000_000  # nanoseconds


class Rank:
    """A layer of which each rank has half of the experts, and this rank's tokens."""

    def __init__(self) -> None:
        self.group, device = join()
        self.idx = self.group.rank()
        self.buffer = get_symm_buffer_for_nvfp4_mega_moe(
            self.group, num_experts=TINY.num_experts, num_max_tokens_per_rank=max(TOKENS),
            num_topk=TINY.num_topk, hidden=TINY.hidden, intermediate=TINY.intermediate,
            activation="bf16", device=device,
        )  # fmt: skip
        # All ranks draw the same weights and tokens, on the CPU.
        w13, w2 = (weights.to(device) for weights in random_weights(TINY, "cpu", 1))
        half = TINY.num_experts // 2
        mine = slice(self.idx * half, (self.idx + 1) * half)
        self.weights = transform_nvfp4_weights_for_mega_moe(
            w13.select(mine), w2.select(mine), arch="sm_90a"
        )
        generator = torch.Generator().manual_seed(0)
        ranks = []
        for count in TOKENS:
            x = torch.randn(count, TINY.hidden, generator=generator).bfloat16()
            ids = spread(TINY, count, generator)
            topk_weights = torch.rand(count, TINY.num_topk, generator=generator) + 0.1
            ranks.append(RankTokens(x.to(device), ids.to(device), topk_weights.to(device)))
        self.tokens = ranks[self.idx]
        outputs = mega_moe(ranks, w13, w2, activation="bf16", swiglu_limit=SWIGLU_LIMIT)
        self.expected = outputs[self.idx].double()

    def launch(self, wait_limit: int = WAIT_LIMIT) -> dict[str, Any]:
        """What came of it: a failure if any, the result's error, seconds until the GPU was done."""
        x = self.tokens.x
        assert isinstance(x, torch.Tensor)
        y = torch.full_like(x, math.nan)
        prepare_inputs(
            x, self.buffer, topk_idx=self.tokens.topk_idx, topk_weights=self.tokens.topk_weights
        )
        torch.cuda.synchronize()
        started = time.monotonic()
        run_sm90_layer(
            y, *self.weights, self.buffer, swiglu_limit=SWIGLU_LIMIT, wait_limit=wait_limit
        )
        failure = self.buffer.failure()
        seconds = time.monotonic() - started
        error = float((y.double() - self.expected).norm() / self.expected.norm())
        named = None if failure is None else {**asdict(failure), "text": str(failure)}
        return {
            "failure": named, "error": error if math.isfinite(error) else None, "seconds": seconds
        }  # fmt: skip


def late(rank: Rank) -> dict[str, Any]:
    """Rank 1 launches after rank 0 has given up."""
    found: dict[str, Any] = {"before": [rank.launch()]}
    for turn in range(2):
        meet(rank.group)
        if rank.idx == turn:
            found["alone"] = rank.launch(ALONE)
            found["uncleared"] = rank.launch(ALONE)
    rank.buffer.clear()
    found["after"] = [rank.launch() for _ in range(3)]
    rank.buffer.destroy()
    dist.destroy_process_group()
    return found


def dead(rank: Rank, folder: Path) -> dict[str, Any]:
    """Rank 1 is killed, and its memory stays mapped here; nothing collective after that."""
    found: dict[str, Any] = {"before": [rank.launch()]}
    pids: list[Any] = [None] * 2
    dist.all_gather_object(pids, os.getpid(), group=rank.group)
    ready = folder / "ready"  # by a file: rank 0 has taken what it was sent
    if rank.idx == 1:
        _wait(ready.exists)
        os.kill(os.getpid(), signal.SIGKILL)
    torch.cuda.synchronize()
    ready.touch()
    _wait(lambda: not Path(f"/proc/{pids[1]}").exists())
    found["alone"] = rank.launch(ALONE)
    return found


def _wait(until: Any) -> None:
    end = time.monotonic() + 8
    while not until():
        assert time.monotonic() < end
        time.sleep(0.01)


def main(folder: Path, way: str) -> None:
    rank = Rank()
    found = late(rank) if way == "late" else dead(rank, folder)
    (folder / f"{rank.idx}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # an orderly end would ask the other rank


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
