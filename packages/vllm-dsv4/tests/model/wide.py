"""A tiny model with eight heads in eight groups, so that eight ranks can share it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file
from torch import Tensor

from modelopt_v4_patches.export import ExportOptions, export_checkpoint


def make_wide(folder: Path, checkpoints: ModuleType) -> Path:
    """Exports it, with NVFP4 wherever there can be."""
    official = folder / "official"
    official.mkdir()
    config = json.loads((checkpoints.TINY / "config.json").read_text())
    config |= {"num_attention_heads": 8, "o_groups": 8}
    (official / "config.json").write_text(json.dumps(config))
    stored = checkpoints.read(checkpoints.TINY)
    tensors = {name: _widened(name, tensor) for name, tensor in stored.items()}
    save_file(tensors, official / "model.safetensors", metadata={"format": "pt"})
    snapshot = checkpoints.make_snapshot(folder / "amax.safetensors", official)
    options = ExportOptions(wo_a="nvfp4", compressor="nvfp4")
    export_checkpoint(official, snapshot, folder / "wide", options)
    return folder / "wide"


def _widened(name: str, tensor: Tensor) -> Tensor:
    """From four heads in two groups to eight in eight, by repeating what is there."""
    repeat: dict[str, Callable[[Tensor], Tensor]] = {
        "attn.wq_b": lambda x: torch.cat([x, x]),
        # [groups * rank, heads * dim / groups]: 2 x 128 rows of 1024 to 8 x 128 rows of 512.
        "attn.wo_a": lambda x: torch.cat([*x.chunk(2, 1)] * 2),
        "attn.wo_b": lambda x: torch.cat([x] * 4, 1),
        "attn.attn_sink": lambda x: torch.cat([x, x]),
    }
    for module, widen in repeat.items():
        if f".{module}" in name and ".indexer." not in name:
            if tensor.dtype.itemsize > 1:
                return widen(tensor).contiguous()
            return widen(tensor.view(torch.uint8)).view(tensor.dtype).contiguous()
    return tensor.clone()
