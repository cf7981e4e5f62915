"""Healthy checkpoints, made from the trained tiny one without the exporter; tests break copies."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_v4_patches.validate import Sample, Validation, examine
from nvfp4_codec import dequantize_fp8_block, mxfp4_to_nvfp4, quantize_nvfp4

TINY = Path(__file__).parents[4] / "tests" / "assets" / "tiny-dsv4"
NUM_EXPERTS = 4
BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
#: What `full` stores as NVFP4 besides the experts, in groups that share one weight_scale_2.
PACKED = (
    ("attn.wq_a", "attn.wkv"),
    ("attn.wq_b",),
    ("attn.wo_b",),
    ("attn.indexer.wq_b",),
    ("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
    ("ffn.shared_experts.w2",),
)


@dataclass
class Content:
    """A checkpoint in memory: tensors, config.json, other files as text."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def quantization(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    def raw(self, name: str) -> Tensor:
        """A tensor's bytes as stored; a change of them stays in this copy."""
        self.tensors[name] = self.tensors[name].clone()
        return self.tensors[name].reshape(-1).view(torch.uint8)


Break: TypeAlias = Callable[[Content], None]
Check: TypeAlias = Callable[..., Validation]


def official() -> Content:
    """The trained tiny model, cut down to four experts for speed."""
    tensors = load_file(TINY / "model.safetensors")
    for name in list(tensors):
        if (found := re.search(r"\.experts\.([0-9]+)\.", name)) and int(found[1]) >= NUM_EXPERTS:
            del tensors[name]
        elif name.endswith(("ffn.gate.weight", "ffn.gate.bias")):
            tensors[name] = tensors[name][:NUM_EXPERTS].clone()
        elif name.endswith("tid2eid"):
            tensors[name] %= NUM_EXPERTS
    config = json.loads((TINY / "config.json").read_text())
    config["n_routed_experts"] = NUM_EXPERTS
    files = {name: (TINY / name).read_text() for name in BESIDE}
    return Content(tensors, config, files)


def _cast(content: Content, modules: list[str]) -> None:
    """MXFP4 experts to NVFP4, a pair with its larger weight_scale_2."""
    t = content.tensors
    pairs = [(t[f"{m}.weight"].view(torch.uint8), t.pop(f"{m}.scale")) for m in modules]
    # E8M0 bytes are exponents: the largest of the pair at 256 leaves 17 octaves below
    top = max(int(scale.view(torch.uint8).max()) for _, scale in pairs)
    scale_2 = torch.tensor(2.0 ** (top - 127 - 8))
    for module, (weight, scale) in zip(modules, pairs, strict=True):
        made = mxfp4_to_nvfp4(weight, scale, weight_scale_2=scale_2)
        assert bool(made.lossless_mask.all())
        _store(content, module, made.weight, made.weight_scale, scale_2)


def _pack(content: Content, modules: list[str]) -> None:
    """FP8 matrices to NVFP4 with the common weight_scale_2 of their amax."""
    t = content.tensors
    values = [dequantize_fp8_block(t[f"{m}.weight"], t.pop(f"{m}.scale")) for m in modules]
    scale_2 = torch.stack([v.abs().max().float() for v in values]).max() / 2688
    for module, value in zip(modules, values, strict=True):
        made = quantize_nvfp4(value, weight_scale_2=scale_2)
        _store(content, module, made.weight, made.weight_scale, scale_2)


def _store(content: Content, module: str, weight: Tensor, scale: Tensor, scale_2: Tensor) -> None:
    content.tensors[f"{module}.weight"] = weight
    content.tensors[f"{module}.weight_scale"] = scale
    content.tensors[f"{module}.weight_scale_2"] = scale_2.clone()
    content.tensors[f"{module}.input_scale"] = torch.tensor(0.004)


def _blocks(content: Content) -> list[str]:
    names = {".".join(name.split(".")[:2]) for name in content.tensors}
    return sorted(name for name in names if name.startswith(("layers.", "mtp.")))


def _experts(content: Content) -> Content:
    for block in _blocks(content):
        for expert in range(content.config["n_routed_experts"]):
            module = f"{block}.ffn.experts.{expert}"
            _cast(content, [f"{module}.w1", f"{module}.w3"])
            _cast(content, [f"{module}.w2"])
    return content


def experts() -> Content:
    """NVIDIA's layout: NVFP4 experts, the rest as it was."""
    content = _experts(official())
    layers = {f"{block}.ffn.experts": {"quant_algo": "NVFP4"} for block in _blocks(content)}
    content.config["quantization_config"] |= {
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "quantized_layers": layers,
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*.e_proj", "mtp.*.h_proj"],
    }
    return content


def full() -> Content:
    """Most matrices of the main model in NVFP4, wo_a and the MTP block in FP8."""
    content = _experts(official())
    layers: dict[str, dict[str, str]] = {}
    for block in _blocks(content):
        layers[f"{block}.ffn.experts"] = {"quant_algo": "NVFP4"}
        groups = PACKED if block.startswith("layers.") else ()
        for group in groups:
            if f"{block}.{group[0]}.scale" in content.tensors:
                _pack(content, [f"{block}.{name}" for name in group])
                layers |= {f"{block}.{name}": {"quant_algo": "NVFP4"} for name in group}
    for name in content.tensors:
        if name.endswith(".scale"):
            layers[name.removesuffix(".scale")] = {"quant_algo": "FP8_PB_WO"}
    content.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "scale_fmt": "ue8m0",
        "quantized_layers": layers,
        "ignore": ["*.ffn.gate", "*.compressor.*", "*.indexer.weights_proj", "head", "embed"],
    }
    return content


@pytest.fixture(scope="session")
def healthy() -> dict[str, Content]:
    return {"official": official(), "experts": experts(), "full": full()}


def _write(content: Content, folder: Path, shards: int = 1) -> Path:
    """A folder, with an index where there are several shards."""
    folder.mkdir(parents=True)
    names = sorted(content.tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        numbered = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        file = numbered if shards > 1 else "model.safetensors"
        part = {name: content.tensors[name].contiguous() for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        total = sum(t.numel() * t.element_size() for t in content.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(content.config))
    for name, text in content.files.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="session")
def write() -> Callable[..., Path]:
    return _write


@pytest.fixture(scope="session")
def tiny(healthy: dict[str, Content], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official checkpoint that the healthy ones are made from."""
    return _write(healthy["official"], tmp_path_factory.mktemp("source") / "official")


@pytest.fixture
def check(healthy: dict[str, Content], tmp_path: Path) -> Check:
    """Breaks a copy of a healthy checkpoint and validates it; bytes are read only if asked for."""

    def run(
        change: Break, preset: str = "full", *, sample: Sample = 0, against: Path | None = None
    ) -> Validation:
        content = healthy[preset]
        config = json.loads(json.dumps(content.config))
        copy = Content(dict(content.tensors), config, dict(content.files))
        change(copy)
        folder = _write(copy, tmp_path / "broken")
        made = examine(folder, against=against, sample=sample)
        shutil.rmtree(folder)
        return made

    return run


@pytest.fixture(scope="session")
def only() -> Callable[[Validation], tuple[str, str, str]]:
    """(code, tensor, fix) of the one finding that a broken checkpoint must have."""

    def run(made: Validation) -> tuple[str, str, str]:
        assert len(made.findings) == 1, made.findings
        finding = made.findings[0]
        return finding.code, finding.tensor, finding.fix

    return run
