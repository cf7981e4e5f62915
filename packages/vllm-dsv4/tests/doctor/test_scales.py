"""Scales: each way in which people broke them has its name, its tensor and its evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from nvfp4_codec import swizzle_blockscale

TINY = Path(__file__).parents[4] / "tests" / "assets" / "tiny-dsv4"
W1, W2, W3 = (f"layers.1.ffn.experts.3.w{i}" for i in (1, 2, 3))
WQ_A, WKV, WO_A, WO_B = (f"layers.2.attn.{name}" for name in ("wq_a", "wkv", "wo_a", "wo_b"))
SHARED = "layers.0.ffn.shared_experts"
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn


def view(name: str, dtype: torch.dtype) -> Any:
    return lambda c: c.tensors.update({name: c.tensors[name].view(dtype)})


def put(name: str, value: float) -> Any:
    return lambda c: c.tensors.update({name: torch.tensor(value)})


def scaled(name: str, factor: float) -> Any:
    return lambda c: c.tensors.update({name: c.tensors[name] * factor})


def without(*names: str) -> Any:
    return lambda c: [c.tensors.pop(name) for name in names]


def fill(name: str, byte: int, start: int = 0, stop: int | None = None) -> Any:
    return lambda c: c.raw(name)[start:stop].fill_(byte)


def exponents(content: Any) -> None:
    """MXFP4 relabelled as NVFP4: the source's E8M0 bytes, each twice, under the E4M3 label."""
    with safe_open(TINY / "model.safetensors", "pt") as source:
        scale = source.get_tensor(f"{W2}.scale").view(torch.uint8)
    content.tensors[f"{W2}.weight_scale"] = scale.repeat_interleave(2, dim=1).view(E4M3)
    content.tensors[f"{W2}.weight_scale_2"] = torch.tensor(1.0)


def decoded_as_e4m3(content: Any) -> None:
    """All FP8 scales as somebody's converter read them: the byte's E4M3 value, in float32."""
    for name in [name for name in content.tensors if name.endswith(".scale")]:
        content.tensors[name] = content.tensors[name].view(E4M3).float()
    content.quantization["scale_fmt"] = "float32"


def reciprocal(content: Any) -> None:
    name = f"{W2}.weight_scale_2"
    content.tensors[name] = 1 / content.tensors[name]


def swizzled(content: Any) -> None:
    swizzle(content, f"{WKV}.weight_scale")


def swizzle(content: Any, name: str) -> None:
    scale = content.tensors[name]
    content.tensors[name] = swizzle_blockscale(scale).data.reshape(scale.shape).view(E4M3)


Case = tuple[Callable[[Any], Any], str, str, str, str]
#: change, code, tensor, level, evidence
CASES: dict[str, Case] = {
    "E8M0 label": (view(f"{W2}.weight_scale", E8M0), "e8m0-read-as-e4m3", f"{W2}.weight",
                   "error", "certain"),
    "E8M0 bytes labelled E4M3": (exponents, "e8m0-read-as-e4m3", f"{W2}.weight",
                                 "suspected", "statistics"),
    "FP8 scales labelled E4M3": (view(f"{WO_A}.scale", E4M3), "e8m0-read-as-e4m3",
                                 f"{WO_A}.scale", "error", "certain"),
    "block scales of ones": (fill(f"{W2}.weight_scale", 0x38), "scales-all-ones", f"{W2}.weight",
                             "error", "statistics"),
    "FP8 scales of ones": (fill(f"{WO_A}.scale", 127), "scales-all-ones", f"{WO_A}.weight",
                           "suspected", "statistics"),
    "no weight_scale_2": (without(f"{WO_B}.weight_scale_2"), "missing-weight-scale-2",
                          f"{WO_B}.weight", "error", "certain"),
    "no weight_scale": (without(f"{WO_B}.weight_scale"), "missing-weight-scale",
                        f"{WO_B}.weight", "error", "certain"),
    "weight_scale_2 of zero": (put(f"{WO_B}.weight_scale_2", 0.0), "bad-global-scale",
                               f"{WO_B}.weight", "error", "certain"),
    "weight_scale_2 of one": (put(f"{WO_B}.weight_scale_2", 1.0), "weight-scale-2-is-one",
                              f"{WO_B}.weight", "error", "statistics"),
    "reciprocal": (reciprocal, "reciprocal-global-scale", f"{W2}.weight", "error", "statistics"),
    "expert pair": (scaled(f"{W3}.weight_scale_2", 0.5), "fused-scale-mismatch", f"{W1}.weight",
                    "handled", "certain"),
    "wq_a and wkv": (scaled(f"{WKV}.weight_scale_2", 0.1), "fused-scale-mismatch",
                     f"{WQ_A}.weight", "handled", "certain"),
    "shared pair": (scaled(f"{SHARED}.w1.weight_scale_2", 1.5), "fused-scale-mismatch",
                    f"{SHARED}.w1.weight", "handled", "certain"),
    "swizzled": (swizzled, "swizzled-scale", f"{WKV}.weight", "suspected", "statistics"),
    "NaN": (fill(f"{W2}.weight_scale", 0x7F, 5, 6), "nan-scale", f"{W2}.weight",
            "error", "certain"),
    "NaN in FP8 scales": (fill(f"{WO_A}.scale", 255, 0, 1), "nan-scale", f"{WO_A}.weight",
                          "error", "certain"),
    "zero": (fill(f"{W2}.weight_scale", 0, 0, 64), "zero-scale", f"{W2}.weight",
             "error", "certain"),
    "negative": (fill(f"{W2}.weight_scale", 0xB8, 0, 1), "negative-scale", f"{W2}.weight",
                 "error", "certain"),
    "FP8 scales of zero bytes": (fill(f"{WO_A}.scale", 0), "bad-scale", f"{WO_A}.weight",
                                 "error", "statistics"),
    "one FP8 scale of 2^73": (fill(f"{WO_A}.scale", 200, 0, 1), "bad-scale", f"{WO_A}.weight",
                              "error", "statistics"),
    "small FP8 scales": (fill(f"{WO_A}.scale", 60), "bad-scale", f"{WO_A}.weight",
                         "error", "statistics"),
    "one input_scale missing": (without(f"{WO_B}.input_scale"), "missing-tensor",
                                f"{WO_B}.input_scale", "error", "certain"),
    "input_scale of zero": (put(f"{WO_B}.input_scale", 0.0), "bad-input-scale",
                            f"{WO_B}.input_scale", "error", "certain"),
    "NaN input_scale": (put(f"{WO_B}.input_scale", math.nan), "bad-input-scale",
                        f"{WO_B}.input_scale", "error", "certain"),
    "reciprocal input_scale": (put(f"{WO_B}.input_scale", 2688.0), "implausible-input-scale",
                               f"{WO_B}.input_scale", "error", "statistics"),
    "tiny input_scale": (put(f"{WO_B}.input_scale", 1e-30), "implausible-input-scale",
                         f"{WO_B}.input_scale", "error", "statistics"),
    "amax as input_scale": (put(f"{WO_B}.input_scale", 12.0), "input-scale-is-amax",
                            f"{WO_B}.input_scale", "suspected", "statistics"),
    "input_scales of a pair": (scaled(f"{W3}.input_scale", 1.5), "fused-input-scale-mismatch",
                               f"{W1}.input_scale", "handled", "certain"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_broken_scale_is_named(check, only, case: str):
    change, code, tensor, level, evidence = CASES[case]
    found = only(check(change))
    assert (found.code, found.tensor) == (code, tensor)
    assert (found.level, found.evidence) == (level, evidence)
    assert found.file == "model.safetensors" or code == "missing-tensor"
    assert found.effect
    assert found.fix


def test_all_fp8_scales_decoded_as_e4m3(check):
    made = check(decoded_as_e4m3, "experts")
    assert {finding.code for finding in made.findings} == {"e8m0-read-as-e4m3"}
    assert {finding.level for finding in made.findings} == {"error"}
    assert f"{WO_A}.weight" in {finding.tensor for finding in made.findings}


def test_mxfp4_scales_labelled_e4m3(check, only):
    found = only(check(view(f"{W2}.scale", E4M3), "official"))
    assert (found.code, found.tensor) == ("e8m0-read-as-e4m3", f"{W2}.weight")


def clamp_and_share(content: Any) -> None:
    """w3 was clamped at 448 under a weight_scale_2 of its own, then got w1's, 8 times larger."""
    name = f"{W3}.weight_scale"
    scale = content.tensors[name].float()
    assert set(scale.flatten().tolist()) == {128.0, 256.0}
    clamped = (2 * scale).clamp(max=448)
    content.tensors[name] = (clamped / 8).to(E4M3)


def test_a_cast_that_was_clamped_and_rescaled_is_not_suspected(check):
    assert check(clamp_and_share).findings == ()


def test_exponents_in_half_of_a_pair_are_suspected(check, only):
    """The same weight with MXFP4's own bytes under the E4M3 label."""

    def change(content: Any) -> None:
        with safe_open(TINY / "model.safetensors", "pt") as source:
            scale = source.get_tensor(f"{W3}.scale").view(torch.uint8)
        content.tensors[f"{W3}.weight_scale"] = scale.repeat_interleave(2, dim=1).view(E4M3)

    found = only(check(change))
    assert (found.code, found.tensor) == ("e8m0-read-as-e4m3", f"{W3}.weight")
    assert (found.level, found.evidence) == ("suspected", "statistics")


def test_codes_without_dimensions_are_named(check):
    def change(content: Any) -> None:
        content.tensors[f"{W2}.weight"] = content.tensors[f"{W2}.weight"][0, 0].clone()

    found = {finding.code: finding.tensor for finding in check(change).findings}
    assert found["shape-mismatch"] == f"{W2}.weight"


def test_even_exponents_in_half_of_a_pair_are_suspected(check, only):
    """No two of the bytes are neighbours, but they have more than two mantissas."""

    def change(content: Any) -> None:
        name = f"{W3}.weight_scale"
        rows, columns = content.tensors[name].shape
        exponents = 112 + 2 * (torch.arange(rows * columns // 2, dtype=torch.uint8) % 6)
        pairs = exponents.view(rows, -1).repeat_interleave(2, dim=1)
        content.tensors[name] = pairs.contiguous().view(E4M3)

    found = only(check(change))
    assert (found.code, found.tensor) == ("e8m0-read-as-e4m3", f"{W3}.weight")


def test_a_padded_scale_is_a_swizzled_one(check, only):
    def change(content: Any) -> None:
        name = "layers.2.attn.indexer.weights_proj"
        del content.tensors[f"{name}.weight"]
        rows, columns = 32, 256
        content.tensors |= {
            f"{name}.weight": torch.ones(rows, columns // 2, dtype=torch.uint8),
            f"{name}.weight_scale": torch.ones(128, columns // 16).to(E4M3),
            f"{name}.weight_scale_2": torch.tensor(1e-4),
            f"{name}.input_scale": torch.tensor(1e-3),
        }

    codes = {finding.code: finding for finding in check(change).findings}
    found = codes["swizzled-scale"]
    assert found.tensor == "layers.2.attn.indexer.weights_proj.weight"
    assert found.evidence == "certain"


def test_no_weight_scale_2_anywhere(check):
    def strip(content: Any) -> None:
        for name in [name for name in content.tensors if name.endswith("weight_scale_2")]:
            del content.tensors[name]

    made = check(strip)
    assert {finding.code for finding in made.findings} == {"missing-weight-scale-2"}
    # 12 experts in 5 blocks; 7 matrices and one indexer's in the 4 layers
    assert len(made.findings) == 5 * 12 + 4 * 7 + 1


def test_no_input_scale_of_a_kind(check, only):
    def strip(content: Any) -> None:
        for name in [n for n in content.tensors if n.endswith("attn.wo_b.input_scale")]:
            del content.tensors[name]

    found = only(check(strip))
    assert (found.code, found.tensor) == ("missing-input-scale", "layers.0.attn.wo_b.weight")
    assert found.level == "error"


def test_input_scales_that_were_never_filled(check, only):
    def ones(content: Any) -> None:
        for name in content.tensors:
            if name.endswith("input_scale"):
                content.tensors[name] = torch.tensor(1.0)

    assert only(check(ones)).code == "input-scales-all-ones"


@pytest.mark.parametrize(
    ("factor", "says", "fix"),
    [
        (0.25, "a quarter of the reference's", "Multiply its weight_scale_2 by 4"),
        (4.0, "four times the reference's", "Divide its weight_scale_2 by 4"),
        (0.5, "SQNR", "look for a scale"),
    ],
)
@pytest.mark.parametrize("module", [W2, WO_B], ids=["expert", "attention"])
def test_a_power_of_two_in_weight_scale_2(
    check, only, tiny, module: str, factor: float, says: str, fix: str
):
    """A factor of four was told as a wrong bias of E8M0 scales, which NVFP4 does not have."""
    found = only(check(scaled(f"{module}.weight_scale_2", factor), reference=tiny))
    assert (found.code, found.tensor) == ("constant-factor", f"{module}.weight")
    assert (found.level, found.evidence) == ("error", "reference")
    assert says in found.found
    assert fix in found.fix
    assert "E8M0" not in found.sentence + found.fix


@pytest.mark.parametrize(
    ("step", "code", "fix"),
    [(-2, "e8m0-bias", "add 2 to every scale byte"), (2, "constant-factor", "Divide its scales")],
)
def test_the_bias_is_named_where_scales_are_e8m0_and_too_low(
    check, only, tiny, step: int, code: str, fix: str
):
    def change(content: Any) -> None:
        content.raw(f"{W2}.scale").add_(step)

    found = only(check(change, "official", reference=tiny))
    assert (found.code, found.tensor) == (code, f"{W2}.weight")
    assert fix in found.fix


def test_the_reference_turns_a_suspicion_into_certainty(check, only, tiny):
    found = only(check(exponents, reference=tiny))
    assert (found.code, found.level, found.evidence) == (
        "e8m0-read-as-e4m3", "error", "reference",
    )  # fmt: skip


def test_all_scales_swizzled(check, tiny):
    """Weights with strong rows or columns betray it; the reference names each one."""

    def change(content: Any) -> None:
        for name in [name for name in content.tensors if name.endswith("weight_scale")]:
            rows, columns = content.tensors[name].shape
            if rows % 128 == 0 and columns % 4 == 0:
                swizzle(content, name)

    found = {finding.tensor for finding in check(change).findings}
    assert {f"layers.{i}.attn.{name}.weight" for i in range(4) for name in ("wkv", "wq_b")} <= found
    assert len(found) > 20
    made = check(change, reference=tiny)
    assert {finding.code for finding in made.findings} == {"swizzled-scale"}
    assert len(made.findings) > 70


def test_one_swizzled_scale_that_only_the_reference_shows(check, only, tiny):
    def change(content: Any) -> None:
        swizzle(content, f"{W2}.weight_scale")

    assert check(change).findings == ()
    found = only(check(change, reference=tiny))
    assert (found.code, found.tensor, found.evidence) == (
        "swizzled-scale", f"{W2}.weight", "reference",
    )  # fmt: skip


def test_the_experts_only_layout_is_read_without_the_plugin(check, only):
    """Stock vLLM serves it, and keeps the larger of two scales."""
    found = only(check(scaled(f"{W3}.weight_scale_2", 0.5), "experts"))
    assert (found.code, found.level) == ("fused-scale-mismatch", "error")


def test_a_handful_of_zero_scales_is_rounding(check):
    """One block in two thousand, as a block far below the largest may round to."""
    assert check(fill(f"{W2}.weight_scale", 0, 0, 2)).findings == ()
