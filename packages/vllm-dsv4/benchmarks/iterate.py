"""Iterating over a full-NVFP4 checkpoint through the transform, against plain iteration.

    python packages/vllm-dsv4/benchmarks/iterate.py --rounds 7

The model is DeepSeek-V4-Pro with every width divided by four, so that the shares of experts,
attention and shared experts are the real ones while a tensor's cost weighs sixteen times as much:
five layers, 384 experts each, seeded random values, 4.6 GB. Plain is what vLLM's loader does with
the ``experts`` checkpoint: open each file, get each tensor. Every tensor is then copied once, as a
parameter's loader does; ``lazy`` leaves that out, so that nothing but the bookkeeping is timed.
Both read from the page cache; they alternate, so that a slow phase of the machine hits both.

Bound: ``full`` through the transform within 1.15 times plain. ``all-nvfp4`` has compressors and
wo_a in NVFP4 too and is shown for comparison. Prints JSON; exit code 1 if the bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nvfp4_codec.backends import available
from nvfp4_codec.schemas.deepseek_v4 import Entry, Layout, ModelConfig, Schema
from vllm_dsv4.options import Options
from vllm_dsv4.stored import read_stored
from vllm_dsv4.transform import Transform

BOUND = 1.15
DIVISOR = 4
#: DeepSeek-V4-Pro's widths; what is not divided below stays.
PRO = {
    "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "o_lora_rank": 1024,
    "moe_intermediate_size": 3072, "index_n_heads": 64, "vocab_size": 129280,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4", **{key: width // DIVISOR for key, width in PRO.items()},
    "head_dim": 512, "o_groups": 16, "n_routed_experts": 384, "num_experts_per_tok": 6,
    "hc_mult": 4, "index_head_dim": 128, "num_hidden_layers": 5, "num_hash_layers": 1,
    "compress_ratios": [128, 4, 128, 4, 128], "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc", "expert_dtype": "fp4", "rope_scaling": {"type": "yarn"},
    "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip
PACKED = {"wq_a", "wkv", "wq_b", "wo_b", "shared_expert", "indexer_wq_b"}
VARIANTS: dict[str, set[str]] = {
    "experts": set(),
    "full": PACKED,
    "all-nvfp4": PACKED | {"wo_a", "compressor"},
}
Named = tuple[str, Tensor]


def write(base: Path) -> dict[str, Path]:
    """All variants; the experts' files, which are the same, are written once and linked."""
    schema = Schema(ModelConfig.from_dict(CONFIG))
    generator = torch.Generator().manual_seed(0)
    shared = base / "shared"
    shared.mkdir()
    for layer in range(CONFIG["num_hidden_layers"]):
        tensors = {
            spec.name: random(spec.name, spec.dtype, spec.shape, generator)
            for entry in schema.entries()
            if entry.role == "routed_expert" and entry.indices[0] == str(layer)
            for spec in schema.stored(entry, "nvfp4")
        }
        save_file(tensors, shared / f"experts-{layer}.safetensors", metadata={"format": "pt"})
    folders = {}
    for variant, packed in VARIANTS.items():
        folder = folders[variant] = base / variant
        folder.mkdir()
        tensors = {
            spec.name: random(spec.name, spec.dtype, spec.shape, generator)
            for entry in schema.entries()
            if entry.role != "routed_expert"
            for spec in schema.stored(entry, layout(entry, packed))
        }
        # wo_a's input is never calibrated
        tensors = {n: t for n, t in tensors.items() if not n.endswith("wo_a.input_scale")}
        save_file(tensors, folder / "rest.safetensors", metadata={"format": "pt"})
        for file in shared.iterdir():
            os.link(file, folder / file.name)
        files = sorted(folder.glob("*.safetensors"))
        names = {name: file.name for file in files for name in keys(file)}
        index = {"metadata": {}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(CONFIG))
    return folders


def layout(entry: Entry, packed: set[str]) -> Layout:
    return "nvfp4" if entry.role in packed else "official"


def random(name: str, dtype: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Finite values of sane magnitude in any dtype of a checkpoint."""
    if name.endswith(("weight_scale_2", "input_scale")):
        return torch.tensor(2.0**-12)
    if dtype in ("U8", "F8_E4M3", "F8_E8M0"):
        low, high = {"U8": (0, 256), "F8_E4M3": (40, 100), "F8_E8M0": (110, 122)}[dtype]
        raw = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
        kinds = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
        return raw.view(kinds.get(dtype, torch.uint8))
    if dtype == "I64":
        return torch.randint(0, 384, shape, generator=generator)
    values = torch.randn(shape, generator=generator) * 0.02
    return values.bfloat16() if dtype == "BF16" else values


def keys(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def plain(folder: Path) -> Iterator[Named]:
    """As vLLM's loader iterates: file by file, tensor by tensor."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def transformed(folder: Path) -> Callable[[], Iterator[Named]]:
    """The same through the transform; reading the headers beforehand is not timed."""
    stored = read_stored(folder)
    return lambda: Transform(stored, Options()).apply(plain(folder))


def drained(stream: Iterator[Named], buffer: Tensor | None) -> int:
    """Takes every tensor, copied into the buffer if there is one; returns the bytes."""
    total = 0
    for _, tensor in stream:
        size = tensor.numel() * tensor.element_size()
        total += size
        if buffer is not None:
            flat = tensor.reshape(-1).view(torch.uint8)
            buffer[:size].copy_(flat)
    return total


def measured(
    streams: dict[str, Callable[[], Iterator[Named]]], rounds: int, buffer: Tensor | None
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    cpu: dict[str, list[float]] = {name: [] for name in streams}
    nbytes = {}
    for _ in range(rounds):
        for name, stream in streams.items():
            start, busy = time.perf_counter(), time.process_time()
            nbytes[name] = drained(stream(), buffer)
            seconds[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - busy)
    return {
        name: {
            "median_seconds": statistics.median(found),
            "best_seconds": min(found),
            "median_cpu_seconds": statistics.median(cpu[name]),
            "gb_per_s": nbytes[name] / statistics.median(found) / 1e9,
            "times_plain": _times(found, seconds["experts plain"]),
            "cpu_times_plain": _times(cpu[name], cpu["experts plain"]),
        }
        for name, found in seconds.items()
    }


def _times(these: list[float], those: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints (5.5 GB)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as base:
        folders = write(Path(base))
        streams: dict[str, Callable[[], Iterator[Named]]] = {
            "experts plain": lambda: plain(folders["experts"]),
            "full transformed": transformed(folders["full"]),
            "all-nvfp4 transformed": transformed(folders["all-nvfp4"]),
        }
        buffer = torch.empty(1 << 28, dtype=torch.uint8)
        drained(plain(folders["experts"]), buffer)  # into the page cache
        copied = measured(streams, arguments.rounds, buffer)
        lazy = measured(streams, arguments.rounds, None)
        nbytes = sum(file.stat().st_size for file in folders["experts"].glob("*.safetensors"))
        count = sum(1 for _ in plain(folders["experts"]))
    reached: float = copied["full transformed"]["times_plain"]
    result = {
        "benchmark": "iterate over a checkpoint through the transform, on one core",
        "checkpoint_gb": nbytes / 1e9,
        "tensors": count,
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load_before": load,
        "versions": {name: version(name) for name in ("torch", "safetensors")},
        "backend_native": available()["native"] or "available",
        "rounds": arguments.rounds,
        "copied": copied,
        "lazy": lazy,
        "bound": BOUND,
        "met": reached <= BOUND,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0 if reached <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
