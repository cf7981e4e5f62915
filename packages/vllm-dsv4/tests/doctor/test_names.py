"""Names and shapes that are almost right, each told for what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvfp4_codec import dequantize_fp8_block, quantize_nvfp4
from nvfp4_codec.schemas.deepseek_v4 import from_official

EXPERT = "layers.1.ffn.experts.3"
INNER, OUTER = "layers.2.attn.indexer.compressor", "layers.2.attn.compressor"
WO_A = "layers.1.attn.wo_a"


def rename(old: str, new: str) -> Any:
    return lambda content: content.rename(old, new)


def quantized(content: Any, module: str, weight: torch.Tensor, *, input_scale: bool = True) -> None:
    made = quantize_nvfp4(weight)
    content.tensors |= {
        f"{module}.weight": made.weight,
        f"{module}.weight_scale": made.weight_scale,
        f"{module}.weight_scale_2": made.weight_scale_2,
    }
    if input_scale:
        content.tensors[f"{module}.input_scale"] = torch.tensor(0.004)


#: change, code, first tensor, what is expected
MISPLACED = {
    "indexer compressor without its level": (
        rename(f"{INNER}.wkv.", "layers.2.attn.indexer.wkv."),
        "indexer-compressor-path", "layers.2.attn.indexer.wkv.weight", f"{INNER}.wkv.weight",
    ),
    "indexer compressor nested as HF does": (
        rename(f"{INNER}.wgate.", "layers.2.attn.compressor.indexer.wgate."),
        "indexer-compressor-path", "layers.2.attn.compressor.indexer.wgate.weight",
        f"{INNER}.wgate.weight",
    ),
    "indexer position bias": (
        rename(f"{INNER}.ape", "layers.2.attn.compressor.indexer.position_bias"),
        "indexer-compressor-path", "layers.2.attn.compressor.indexer.position_bias",
        f"{INNER}.ape",
    ),
    "kv_norm called norm": (
        rename("layers.0.attn.kv_norm", "layers.0.attn.norm"),
        "kv-norm-name", "layers.0.attn.norm.weight", "layers.0.attn.kv_norm.weight",
    ),
    "the compressor's norm called kv_norm": (
        rename(f"{OUTER}.norm", f"{OUTER}.kv_norm"),
        "kv-norm-name", f"{OUTER}.kv_norm.weight", f"{OUTER}.norm.weight",
    ),
    "the compressor's norm at attention level": (
        rename(f"{OUTER}.norm", "layers.2.attn.norm"),
        "kv-norm-name", "layers.2.attn.norm.weight", f"{OUTER}.norm.weight",
    ),
    "gate_proj": (
        rename(f"{EXPERT}.w1", f"{EXPERT}.gate_proj"),
        "expert-names", f"{EXPERT}.gate_proj.weight", f"{EXPERT}.w1.weight",
    ),
    "up_proj of a shared expert": (
        rename("layers.0.ffn.shared_experts.w3", "layers.0.ffn.shared_experts.up_proj"),
        "expert-names", "layers.0.ffn.shared_experts.up_proj.weight",
        "layers.0.ffn.shared_experts.w3.weight",
    ),
    "down_proj of all experts": (
        lambda c: [c.rename(f"layers.1.ffn.experts.{i}.w2", f"layers.1.ffn.experts.{i}.down_proj")
                   for i in range(4)],
        "expert-names", "layers.1.ffn.experts.0.down_proj.weight",
        "layers.1.ffn.experts.0.w2.weight",
    ),
    "mlp for ffn": (
        rename("layers.0.ffn.gate.", "layers.0.mlp.gate."),
        "block-names", "layers.0.mlp.gate.weight", "layers.0.ffn.gate.weight",
    ),
    "self_attn for attn": (
        rename("layers.3.attn.wq_b.", "layers.3.self_attn.wq_b."),
        "block-names", "layers.3.self_attn.wq_b.weight", "layers.3.attn.wq_b.weight",
    ),
    "self_attn with HF's words": (
        rename("layers.3.attn.wq_b.", "layers.3.self_attn.q_b_proj."),
        "block-names", "layers.3.self_attn.q_b_proj.weight", "layers.3.attn.wq_b.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISPLACED)
def test_a_misplaced_tensor_is_one_finding(check, only, case: str):
    change, code, tensor, expected = MISPLACED[case]
    found = check(change).findings
    assert {finding.code for finding in found} == {code}
    first = {finding.tensor: finding for finding in found}[tensor]
    assert expected in first.expected
    assert first.level == "error"
    assert first.file == "model.safetensors"


def test_a_misplaced_tensor_under_hf_names(check):
    """kv_norm is right there; ``norm`` is not."""

    def change(content: Any) -> None:
        content.rename("model.layers.0.self_attn.kv_norm", "model.layers.0.self_attn.norm")

    (found,) = [f for f in check(change, "full", "hf").findings if f.level == "error"]
    assert (found.code, found.tensor) == ("kv-norm-name", "model.layers.0.self_attn.norm.weight")


@pytest.mark.parametrize("path", ["indexer", "indexer.compressor"])
def test_the_indexers_compressor_under_hf_names_at_another_level(check, path: str):
    """HF nests the indexer in the compressor."""
    attn = "model.layers.2.self_attn"

    def change(content: Any) -> None:
        content.rename(f"{attn}.compressor.indexer.kv_proj", f"{attn}.{path}.kv_proj")

    (found,) = [f for f in check(change, "full", "hf").findings if f.level == "error"]
    assert (found.code, found.tensor) == (
        "indexer-compressor-path", f"{attn}.{path}.kv_proj.weight",
    )  # fmt: skip
    assert f"{attn}.compressor.indexer.kv_proj.weight" in found.expected


def test_a_layer_in_another_scheme(check, only):
    def change(content: Any) -> None:
        content.tensors = {
            from_official(n, "hf") if n.startswith("layers.3.") else n: t
            for n, t in content.tensors.items()
        }

    found = only(check(change))
    assert (found.code, found.level) == ("mixed-names", "error")
    assert found.tensor.startswith("model.layers.3.")
    assert "most names are official" in found.expected


def test_a_second_copy_in_another_scheme(check, only):
    def change(content: Any) -> None:
        weight = content.tensors["layers.0.attn.q_norm.weight"]
        content.tensors["model.layers.0.self_attn.q_a_norm.weight"] = weight.clone()

    found = only(check(change))
    assert (found.code, found.level) == ("mixed-names", "error")
    assert found.tensor == "model.layers.0.self_attn.q_a_norm.weight"


def test_names_without_the_prefix_everywhere(check):
    """HF names as some tools strip them: no scheme has these, and none is called missing."""

    def change(content: Any) -> None:
        content.tensors = {n.removeprefix("model."): t for n, t in content.tensors.items()}

    found = check(change, "full", "hf").findings
    errors = [finding for finding in found if finding.level == "error"]
    assert not {"missing-tensor", "unknown-tensor"} & {finding.code for finding in errors}
    assert {"block-names", "expert-names", "kv-norm-name"} <= {finding.code for finding in errors}
    assert any(f.tensor == "layers.0.self_attn.q_a_proj.weight" for f in errors)


def test_a_tensor_that_the_model_does_not_have(check, only):
    def change(content: Any) -> None:
        content.tensors["layers.0.attn.compressor.position_bias"] = torch.zeros(4, 4)

    found = only(check(change))
    assert (found.code, found.level) == ("unknown-tensor", "handled")
    assert found.tensor == "layers.0.attn.compressor.position_bias"


@pytest.mark.parametrize("name", ["layers.0.attn.attn_sink", "norm.weight", "embed.weight"])
def test_a_tensor_that_is_missing(check, only, name: str):
    found = only(check(lambda content: content.tensors.pop(name)))
    assert (found.code, found.tensor, found.level) == ("missing-tensor", name, "error")


def test_mtp_blocks_that_are_missing(check, only):
    def change(content: Any) -> None:
        for name in [name for name in content.tensors if name.startswith("mtp.")]:
            del content.tensors[name]

    found = only(check(change))
    assert (found.code, found.level) == ("missing-mtp", "handled")


@pytest.mark.parametrize("leaf", ["wkv", "wgate"])
def test_the_outer_compressors_shape(check, only, leaf: str):
    def change(content: Any) -> None:
        content.tensors[f"{INNER}.{leaf}.weight"] = content.tensors[
            f"{OUTER}.{leaf}.weight"
        ].clone()

    found = only(check(change))
    assert (found.code, found.tensor) == ("indexer-compressor-shape", f"{INNER}.{leaf}.weight")
    assert "outer" in found.found


def test_the_outer_compressors_shape_in_nvfp4(check, only):
    def change(content: Any) -> None:
        for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            content.tensors[f"{INNER}.wkv.{part}"] = content.tensors[f"{OUTER}.wkv.{part}"].clone()

    codes = {(f.code, f.tensor) for f in check(change, "all-nvfp4").findings if f.level == "error"}
    assert codes == {("indexer-compressor-shape", f"{INNER}.wkv.weight")}


def test_the_indexers_compressor_under_the_outer_names(check):
    """What the outer keys hold after a loader has taken one for the other."""

    def change(content: Any) -> None:
        for leaf in ("wkv", "wgate"):
            inner = content.tensors.pop(f"{INNER}.{leaf}.weight")
            content.tensors[f"{OUTER}.{leaf}.weight"] = inner

    found = {(f.code, f.tensor) for f in check(change).findings}
    assert found == {
        ("indexer-compressor-shape", f"{OUTER}.wkv.weight"),
        ("indexer-compressor-shape", f"{OUTER}.wgate.weight"),
        ("missing-tensor", f"{INNER}.wkv.weight"),
        ("missing-tensor", f"{INNER}.wgate.weight"),
    }


def exchange(content: Any, a: str, b: str) -> None:
    t = content.tensors
    for name in [name for name in t if name.startswith(f"{a}.")]:
        other = b + name.removeprefix(a)
        t[name], t[other] = t[other], t[name]


def test_gate_and_down_exchanged(check):
    made = check(lambda content: exchange(content, f"{EXPERT}.w1", f"{EXPERT}.w2"))
    codes = {(f.code, f.tensor) for f in made.findings if f.level == "error"}
    assert codes == {
        ("expert-projections-swapped", f"{EXPERT}.w1.weight"),
        ("expert-projections-swapped", f"{EXPERT}.w2.weight"),
    }


def test_gate_and_up_exchanged_needs_the_reference(check, only, tiny):
    def change(content: Any) -> None:
        exchange(content, f"{EXPERT}.w1", f"{EXPERT}.w3")

    made = check(change)
    assert made.findings == ()
    assert any("w1 (gate) and w3 (up)" in question for question in made.open_questions)
    found = only(check(change, reference=tiny))
    assert (found.code, found.tensor) == ("gate-up-swapped", f"{EXPERT}.w1.weight")
    assert (found.level, found.evidence) == ("error", "reference")


def test_gate_and_up_of_a_shared_expert_exchanged(check, only, tiny):
    shared = "layers.0.ffn.shared_experts"

    def change(content: Any) -> None:
        exchange(content, f"{shared}.w1", f"{shared}.w3")

    found = only(check(change, reference=tiny))
    assert (found.code, found.tensor) == ("gate-up-swapped", f"{shared}.w1.weight")


def test_wo_a_in_nvfp4_where_another_format_is_promised(check, only):
    def change(content: Any) -> None:
        t = content.tensors
        weight = dequantize_fp8_block(t[f"{WO_A}.weight"], t.pop(f"{WO_A}.scale"))
        quantized(content, WO_A, weight, input_scale=False)

    found = only(check(change))
    assert (found.code, found.tensor, found.level) == ("wo-a-format", f"{WO_A}.weight", "handled")
    assert "NVFP4" in found.found


def test_wo_a_in_bf16_where_nvfp4_is_promised(check, only, healthy):
    weight = healthy("wo-a-bf16").tensors[f"{WO_A}.weight"]

    def change(content: Any) -> None:
        for part in ("weight_scale", "weight_scale_2"):
            del content.tensors[f"{WO_A}.{part}"]
        content.tensors[f"{WO_A}.weight"] = weight

    found = only(check(change, "all-nvfp4"))
    assert (found.code, found.tensor, found.level) == ("wo-a-format", f"{WO_A}.weight", "handled")
    assert "BF16" in found.found


def test_wo_a_as_codes_without_scales(check, only):
    def change(content: Any) -> None:
        for part in ("weight_scale", "weight_scale_2"):
            del content.tensors[f"{WO_A}.{part}"]

    found = only(check(change, "all-nvfp4"))
    assert (found.code, found.tensor) == ("missing-weight-scale", f"{WO_A}.weight")
    assert found.level == "error"


def test_nvfp4_codes_under_the_dtype_of_mxfp4(check, only):
    names = [f"layers.1.ffn.experts.{i}.w1.weight" for i in (2, 3)]

    def change(content: Any) -> None:
        for name in names:
            content.tensors[name] = content.tensors[name].view(torch.int8)

    found = only(check(change))
    assert (found.code, found.tensor, found.level) == ("dtype-mismatch", names[0], "error")
    assert "1 more" in found.found


def test_mxfp4_experts_where_nvfp4_is_claimed(check, healthy):
    """The official tensors under an NVFP4 export's config."""

    def change(content: Any) -> None:
        content.tensors = healthy("official").tensors

    made = check(change, "experts")
    assert {f.code for f in made.findings} == {"mxfp4-experts"}
    assert {f.level for f in made.findings} == {"error"}
    assert made.findings[0].tensor == "layers.0.ffn.experts.0.w1.weight"
    assert made.kind == "experts-only layout, MXFP4 experts"


def test_fused_projections_in_two_formats(check, only):
    def change(content: Any) -> None:
        t = content.tensors
        for part in ("weight_scale", "weight_scale_2", "input_scale"):
            del t[f"layers.0.attn.wkv.{part}"]
        t["layers.0.attn.wkv.weight"] = torch.zeros(512, 256, dtype=torch.bfloat16)

    found = {f.code: f.level for f in check(change).findings}
    assert found["fused-format-mismatch"] == "handled"
