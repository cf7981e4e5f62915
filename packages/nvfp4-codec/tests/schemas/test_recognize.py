"""survey tells what a checkpoint's headers hold; recognize refuses all but exactly the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from nvfp4_codec.checkpoint.reader import TensorInfo
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema, Scheme, from_official
from nvfp4_codec.schemas.deepseek_v4.recognize import survey

DATA = Path(__file__).parent / "data"
CONFIG = ModelConfig.from_dict(json.loads((DATA / "tiny.config.json").read_text()))


def _infos(scheme: Scheme, *, mtp: bool = True) -> dict[str, TensorInfo]:
    """Headers of the tiny model with its linears in NVFP4."""
    schema = Schema(CONFIG if mtp else CONFIG.without_mtp())
    specs = schema.tensors("nvfp4")
    return {
        name: TensorInfo(name, spec.dtype, spec.shape, "model.safetensors", 0, 0)
        for spec in specs
        for name in [from_official(spec.name, scheme)]
    }


def _add(infos: Mapping[str, TensorInfo], name: str) -> dict[str, TensorInfo]:
    return {**infos, name: TensorInfo(name, "F32", (1,), "model.safetensors", 0, 4)}


@pytest.mark.parametrize("scheme", ["official", "hf", "half_converted"])
@pytest.mark.parametrize("mtp", [True, False])
def test_a_whole_model_in_any_scheme(scheme: Scheme, mtp: bool) -> None:
    found = survey(_infos(scheme, mtp=mtp), CONFIG)
    assert found.scheme == scheme
    assert found.report.ok
    assert found.has_mtp is mtp
    assert found.tensors.keys() == _infos("official", mtp=mtp).keys()
    layouts = {found.layout(entry) for entry in found.schema.entries() if entry.template.row.linear}
    assert layouts == {"nvfp4"}


@pytest.mark.parametrize("scheme", ["official", "hf", "half_converted"])
def test_unknown_and_missing_names_are_listed_as_they_are_written(scheme: Scheme) -> None:
    infos = _infos(scheme)
    lost = from_official("layers.1.attn.wq_b.weight_scale", scheme)
    del infos[lost]
    found = survey(_add(infos, "layers.0.nothing"), CONFIG)
    assert found.report.missing == (lost,)
    assert found.report.unknown == ("layers.0.nothing",)
    assert "layers.0.nothing" not in found.tensors


def test_a_lacking_weight_has_the_plain_layout() -> None:
    infos = _infos("official")
    del infos["layers.1.attn.wq_b.weight"]
    found = survey(infos, CONFIG)
    (entry,) = [e for e in found.schema.entries() if e.name() == "layers.1.attn.wq_b.weight"]
    assert found.layout(entry) == "plain"


def test_names_of_no_scheme_are_refused() -> None:
    with pytest.raises(CheckpointError, match="no name is one of DeepSeek-V4's"):
        survey(_add({}, "transformer.h.0.weight"), CONFIG)
