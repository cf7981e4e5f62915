"""Export of expert shards in one process against cp + fsync, and against NVIDIA's cast.

    python packages/modelopt-v4-patches/benchmarks/export.py --gib 4 --rounds 5

Bounds: 1.5 times cp + fsync of the same bytes, and 50 times as many matrices in a second as
modelopt's ``quantize_mxfp4_to_nvfp4_lossless``, which keeps every code as well. Experts have
DeepSeek-V4-Pro's size (3072 x 7168); the rest of the model is small and copied. The clock runs
from the first look at the checkpoint to the fsync of the last file, SHA-256 of every shard
included, imports (once, some seconds) not. Export and cp alternate, so that a slow phase of the
machine hits both; the input is in the page cache for both. The result is verified first. Prints
JSON.
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
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelopt_v4_patches.export import ExportOptions, export_checkpoint
from modelopt_v4_patches.snapshot import REQUIRED, Snapshot, config_sha256
from nvfp4_codec import dequantize_mxfp4, dequantize_nvfp4
from nvfp4_codec.checkpoint import Checkpoint
from nvfp4_codec.checkpoint.header import TensorSpec, build_header
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema

CP_BOUND, CAST_BOUND = 1.5, 50.0
ROWS, COLUMNS = 3072, 7168
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4", "num_hidden_layers": 1, "compress_ratios": [0],
    "num_nextn_predict_layers": 0, "num_hash_layers": 0, "num_experts_per_tok": 6,
    "vocab_size": 128, "hidden_size": COLUMNS, "moe_intermediate_size": ROWS,
    "num_attention_heads": 2, "head_dim": 128, "q_lora_rank": 128, "o_lora_rank": 128,
    "o_groups": 2, "hc_mult": 4, "index_n_heads": 1, "index_head_dim": 128, "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"},
}  # fmt: skip


def write_input(folder: Path, nbytes: int) -> int:
    """A checkpoint with as many experts as fit, in two shards; returns its bytes."""
    per_expert = 3 * (ROWS * COLUMNS // 2 + ROWS * COLUMNS // 32)
    config = {**CONFIG, "n_routed_experts": max(6, nbytes // per_expert)}
    specs = [TensorSpec(*s) for s in Schema(ModelConfig.from_dict(config)).tensors("official")]
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, ROWS * COLUMNS // 2, dtype=np.uint8)
    scales = rng.integers(113, 123, ROWS * COLUMNS // 32, dtype=np.uint8)
    weight_map, total = {}, 0
    for i in range(2):
        part = [spec for spec in specs if (".experts." in spec.name) == bool(i)]
        layout = build_header(part, {"format": "pt"})
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        with (folder / file).open("wb") as out:
            out.write(layout.header)
            for spec in sorted(part, key=lambda spec: layout.ranges[spec.name]):
                expert = codes if spec.dtype == "I8" else scales
                out.write(expert.data if i else bytes(spec.nbytes))
            out.flush()
            os.fsync(out.fileno())
        weight_map.update({spec.name: file for spec in part})
        total += layout.size
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def write_snapshot(path: Path, config: dict[str, Any]) -> None:
    """The two quantizers that all experts of the layer share."""
    names = [f"model.layers.0.mlp.experts.{p}_proj_input_quantizer" for p in ("gate_up", "down")]
    about: dict[str, Any] = {name: {"shape": []} for name in names}
    metadata = dict.fromkeys(REQUIRED, "") | {
        "format": "dsv4-amax-snapshot", "version": "1", "complete": "true",
        "quantizers": json.dumps(about), "config_sha256": config_sha256(config),
    }  # fmt: skip
    Snapshot({name: torch.tensor(4.0) for name in names}, metadata).save(path)


def verify(source: Path, output: Path) -> int:
    """Compares every expert's values with the official ones; returns how many there are."""
    count = 0
    with Checkpoint.open(source) as before, Checkpoint.open(output) as after:
        for name in before.tensors:
            if ".experts." not in name or not name.endswith(".weight"):
                continue
            scale = before.tensor(name.removesuffix("weight") + "scale")
            official = dequantize_mxfp4(before.tensor(name), scale)
            parts = [after.tensor(f"{name}{part}") for part in ("", "_scale", "_scale_2")]
            assert torch.equal(dequantize_nvfp4(*parts), official), name
            count += 1
    return count


def copy(source: Path, output: Path) -> None:
    """Plain cp of all shards and their fsync. (Not on a file system with reflinks.)"""
    output.mkdir()
    subprocess.run(["cp", *sorted(source.glob("*.safetensors")), output], check=True)
    for path in output.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def timed(action: Callable[[Path], object], output: Path, source: Path) -> float:
    """Seconds of one run into a new folder, the input read before."""
    for path in source.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(1 << 24)
            while file.readinto(buffer):
                pass
    os.sync()
    start = time.perf_counter()
    action(output)
    seconds = time.perf_counter() - start
    subprocess.run(["rm", "-r", output], check=True)
    return seconds


def nvidia_seconds(source: Path, matrices: int) -> list[float]:
    """modelopt's lossless cast of single matrices, read before: its arithmetic alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.export import mxfp4_kmax, quantize_mxfp4_to_nvfp4_lossless
    seconds = []
    with Checkpoint.open(source) as checkpoint:
        for expert in range(matrices):
            base = f"layers.0.ffn.experts.{expert}.w1"
            weight, scale = (checkpoint.tensor(f"{base}.{part}") for part in ("weight", "scale"))
            start = time.perf_counter()
            quantize_mxfp4_to_nvfp4_lossless(weight, scale, mxfp4_kmax(scale), "cpu")
            seconds.append(time.perf_counter() - start)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    arguments = parser.parse_args()
    options = ExportOptions("experts")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        source, output = Path(name) / "official", Path(name) / "out"
        snapshot = Path(name) / "amax.safetensors"
        source.mkdir()
        size = write_input(source, int(arguments.gib * 2**30))
        write_snapshot(snapshot, json.loads((source / "config.json").read_text()))
        export_checkpoint(source, snapshot, output, options)
        matrices = verify(source, output)
        subprocess.run(["rm", "-r", output], check=True)
        actions: dict[str, Callable[[Path], object]] = {
            "cp_fsync": lambda out: copy(source, out),
            "export": lambda out: export_checkpoint(source, snapshot, out, options),
        }
        times: dict[str, list[float]] = {key: [] for key in actions}
        for _ in range(arguments.rounds):
            for key, action in actions.items():
                times[key].append(timed(action, output, source))
        cast = nvidia_seconds(source, min(3, matrices // 3))
    median = {key: statistics.median(values) for key, values in times.items()}
    ratios = [e / c for e, c in zip(times["export"], times["cp_fsync"], strict=True)]
    result = {
        "benchmark": "export of MXFP4 experts in one process",
        "matrices_verified": matrices,
        "input_bytes": size,
        "cpus": os.cpu_count(),
        "load_after": os.getloadavg()[0],
        "torch_threads": torch.get_num_threads(),
        "seconds": {key: [round(v, 3) for v in values] for key, values in times.items()},
        "export_gb_per_second": size / median["export"] / 1e9,
        "ratio_to_cp_fsync": median["export"] / median["cp_fsync"],
        "median_of_ratios": statistics.median(ratios),
        "cp_bound": CP_BOUND,
        "nvidia_seconds_per_matrix": [round(v, 3) for v in cast],
        "export_seconds_per_matrix": median["export"] / matrices,
        "times_nvidias_cast": statistics.median(cast) * matrices / median["export"],
        "cast_bound": CAST_BOUND,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
