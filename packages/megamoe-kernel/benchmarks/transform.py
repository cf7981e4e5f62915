"""Time the weight transforms of one MoE layer; prints JSON.

The default is a rank of DeepSeek-V4-Pro at EP 8: 48 experts of hidden 7168 and intermediate 3072,
1.8 GB of codes and scales, and as much again for the result. The result is verified before it is
timed: the inverse must give every bit back.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from megamoe_kernel import (
    ExpertWeights,
    transform_nvfp4_weights_for_mega_moe,
    untransform_nvfp4_weights,
)
from megamoe_kernel.weights import Arch

ARCHS: tuple[Arch, ...] = ("sm_100a", "sm_90a")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    w13 = _random(
        arguments.experts, 2 * arguments.intermediate, arguments.hidden, 2, arguments.device
    )
    w2 = _random(arguments.experts, arguments.hidden, arguments.intermediate, 1, arguments.device)
    report: dict[str, object] = {
        "device": _device_name(arguments.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "shape": [arguments.experts, arguments.hidden, arguments.intermediate],
    }
    for arch in ARCHS:
        _verify(w13, w2, arch)
        seconds = []
        for _ in range(arguments.repeat):
            start = _now(arguments.device)
            l1, l2 = transform_nvfp4_weights_for_mega_moe(w13, w2, arch=arch)
            seconds.append(_now(arguments.device) - start)
        nbytes = l1.nbytes + l2.nbytes
        best = min(seconds)
        report[arch] = {"seconds": best, "bytes": nbytes, "GB_per_s": nbytes / best / 1e9}
        del l1, l2
    print(json.dumps(report, indent=1))


def _random(experts: int, rows: int, columns: int, parts: int, device: str) -> ExpertWeights:
    codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(0, 127, (experts, rows, columns // 16), dtype=torch.uint8, device=device)
    alpha = torch.rand(experts, parts, device=device) + 0.1
    return ExpertWeights(codes, scale.view(torch.float8_e4m3fn), alpha)


def _verify(w13: ExpertWeights, w2: ExpertWeights, arch: Arch) -> None:
    back = untransform_nvfp4_weights(*transform_nvfp4_weights_for_mega_moe(w13, w2, arch=arch))
    for a, b in zip(back, (w13, w2), strict=True):
        scales = [w.weight_scale.view(torch.uint8) for w in (a, b)]
        if not (torch.equal(a.weight, b.weight) and torch.equal(*scales)):
            raise SystemExit(f"{arch}: the inverse does not give the weights back")


def _now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


if __name__ == "__main__":
    main()
