"""The trained tiny DeepSeek-V4: complete by the schema, sound, and cast to NVFP4 without a loss."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import torch

from nvfp4_codec import dequantize_mxfp4, dequantize_nvfp4
from nvfp4_codec.checkpoint import Checkpoint, verify_checkpoint
from nvfp4_codec.cli import main as nvfp4
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema

TINY = Path(__file__).with_name("assets") / "tiny-dsv4"


def test_has_every_tensor_of_the_schema_in_its_dtype_and_shape() -> None:
    schema = Schema(ModelConfig.from_file(TINY / "config.json"))
    with Checkpoint.open(TINY) as checkpoint:
        report = schema.match(checkpoint.tensors)
        assert report.ok, report.summary()
        expected = {t.name: (t.dtype, t.shape) for t in schema.tensors("official", "official")}
        found = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
        assert found == expected


def test_is_sound_and_its_experts_cast_exactly(tmp_path: Path) -> None:
    with Checkpoint.open(TINY) as checkpoint:
        assert verify_checkpoint(checkpoint) == []
    assert nvfp4(["convert", str(TINY), str(tmp_path / "out"), "--to", "nvfp4"]) == 0
    kinds: Counter[str] = Counter()
    with Checkpoint.open(TINY) as before, Checkpoint.open(tmp_path / "out") as after:
        assert verify_checkpoint(after) == []
        for name, info in before.tensors.items():
            if ".experts." not in name:
                assert torch.equal(_bytes(before, name), _bytes(after, name)), name
                kinds["verbatim"] += 1
            elif info.dtype == "I8":
                assert torch.equal(_bytes(before, name), _bytes(after, name)), name
                scale = before.tensor(name.removesuffix("weight") + "scale")
                parts = [after.tensor(f"{name}{part}") for part in ("", "_scale", "_scale_2")]
                official = dequantize_mxfp4(before.tensor(name), scale)
                assert torch.equal(dequantize_nvfp4(*parts), official), name
                kinds["cast"] += 1
    assert kinds["cast"] == 5 * 16 * 3  # four layers and the MTP layer, w1 w2 w3 of 16 experts
    assert kinds["verbatim"] > 100


def test_its_one_fitted_scalar_was_chosen_on_validation_text_alone() -> None:
    settling = json.loads((TINY / "training.json").read_text())["settling"]
    factor = json.loads((TINY / "config.json").read_text())["routed_scaling_factor"]
    assert factor == settling["routed_scaling_factor"]["settled"]
    losses = settling["losses"]
    assert min(losses, key=losses.get) == str(factor)
    assert len(losses) >= 4  # three points of a parabola, and its vertex
    for excerpt in settling["validation_excerpts"]:
        first, second = hashlib.sha256(excerpt.partition("+")[0].encode()).digest()[:2]
        assert first % 16 == 0, excerpt
        assert second % 2 == 0, excerpt


def _bytes(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint.tensor(name).view(-1).view(torch.uint8)
