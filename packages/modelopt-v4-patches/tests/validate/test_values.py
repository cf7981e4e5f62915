"""Faults that only bytes show, alone and against the source, each found by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

W1, W2, W3 = (f"layers.1.ffn.experts.3.w{i}" for i in (1, 2, 3))
WQ_A, WKV, WO_B = (f"layers.2.attn.{name}" for name in ("wq_a", "wkv", "wo_b"))


def put(name: str, value: float) -> Any:
    return lambda c: c.tensors.update({name: torch.tensor(value)})


def scale(name: str, factor: float) -> Any:
    return lambda c: c.tensors.update({name: c.tensors[name] * factor})


def byte(name: str, value: int, index: int = 7) -> Any:
    def change(content: Any) -> None:
        content.raw(name)[index] = value

    return change


def fill(name: str, value: int) -> Any:
    return lambda content: content.raw(name).fill_(value)


def e8m0_as_e4m3(content: Any) -> None:
    """Exponents, one per 16 values, under the E4M3 label."""
    raw = content.raw(f"{W2}.weight_scale")
    pairs = 110 + torch.arange(raw.numel() // 2, dtype=torch.uint8) % 5
    raw.copy_(pairs.repeat_interleave(2))


def reciprocal(content: Any) -> None:
    name = f"{W2}.weight_scale_2"
    content.tensors[name] = 1 / content.tensors[name]


def nan_in_norm(content: Any) -> None:
    content.tensors["norm.weight"] = content.tensors["norm.weight"].clone()
    content.tensors["norm.weight"][3] = math.nan


ALONE = {
    "NaN block scale": (byte(f"{W2}.weight_scale", 0x7F), "nan-scale", f"{W2}.weight"),
    "negative block scale": (byte(f"{W2}.weight_scale", 0xB8), "negative-scale", f"{W2}.weight"),
    "block scales of ones": (fill(f"{W2}.weight_scale", 0x38), "scales-all-ones", f"{W2}.weight"),
    "E8M0 read as E4M3": (e8m0_as_e4m3, "e8m0-read-as-e4m3", f"{W2}.weight"),
    "global scale of zero": (put(f"{W2}.weight_scale_2", 0.0), "bad-global-scale", f"{W2}.weight"),
    "NaN global scale": (put(f"{W2}.weight_scale_2", math.nan), "bad-global-scale",
                         f"{W2}.weight"),
    "negative global scale": (put(f"{W2}.weight_scale_2", -1e-4), "bad-global-scale",
                              f"{W2}.weight"),
    "reciprocal global scale": (reciprocal, "reciprocal-global-scale", f"{W2}.weight"),
    "expert pair": (scale(f"{W3}.weight_scale_2", 0.5), "fused-scale-mismatch", f"{W1}.weight"),
    "wq_a and wkv": (scale(f"{WKV}.weight_scale_2", 0.1), "fused-scale-mismatch",
                     f"{WQ_A}.weight"),
    "shared pair": (scale("layers.0.ffn.shared_experts.w1.weight_scale_2", 1.5),
                    "fused-scale-mismatch", "layers.0.ffn.shared_experts.w1.weight"),
    "input_scale of zero": (put(f"{WO_B}.input_scale", 0.0), "bad-input-scale",
                            f"{WO_B}.input_scale"),
    "NaN input_scale": (put(f"{WO_B}.input_scale", math.nan), "bad-input-scale",
                        f"{WO_B}.input_scale"),
    "infinite input_scale": (put(f"{WO_B}.input_scale", math.inf), "bad-input-scale",
                             f"{WO_B}.input_scale"),
    "negative input_scale": (put(f"{WO_B}.input_scale", -0.01), "bad-input-scale",
                             f"{WO_B}.input_scale"),
    "amax as input_scale": (put(f"{WO_B}.input_scale", 12.0), "input-scale-is-amax",
                            f"{WO_B}.input_scale"),
    "fused input_scales": (put(f"{WKV}.input_scale", 0.005), "fused-input-scale-mismatch",
                           f"{WQ_A}.input_scale"),
    "expert pair's input_scales": (put(f"{W3}.input_scale", 0.005), "fused-input-scale-mismatch",
                                   f"{W1}.input_scale"),
    "reciprocal input_scale": (put(f"{WO_B}.input_scale", 2688 / 0.5), "implausible-input-scale",
                               f"{WO_B}.input_scale"),
    "NaN in a norm": (nan_in_norm, "nonfinite-weight", "norm.weight"),
    "NaN in FP8": (byte("layers.0.attn.wo_a.weight", 0x7F), "nonfinite-weight",
                   "layers.0.attn.wo_a.weight"),
    "NaN in FP8 scales": (byte("layers.0.attn.wo_a.scale", 0xFF), "nan-scale",
                          "layers.0.attn.wo_a.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", ALONE)
def test_faults_that_bytes_show(check, only, case: str):
    change, code, tensor = ALONE[case]
    found = only(check(change, sample="all"))
    assert found[:2] == (code, tensor)
    assert found[2]


SCALARS = [
    case for case, (_, code, _) in ALONE.items()
    if code in ("bad-global-scale", "fused-scale-mismatch", "bad-input-scale",
                "implausible-input-scale", "input-scale-is-amax", "fused-input-scale-mismatch")
]  # fmt: skip


@pytest.mark.parametrize("case", SCALARS)
def test_scalar_faults_show_in_any_sample(check, only, case: str):
    """Even where no byte of that weight is read: scalars always are."""
    change, code, tensor = ALONE[case]
    assert only(check(change, sample=1))[:2] == (code, tensor)


def test_input_scales_that_were_never_filled(check, only):
    def ones(content: Any) -> None:
        for name in content.tensors:
            if name.endswith("input_scale"):
                content.tensors[name] = torch.tensor(1.0)

    assert only(check(ones, sample=1))[:2] == ("input-scales-all-ones", "*.input_scale")


def test_a_large_input_scale_is_a_guess(check):
    (finding,) = check(put(f"{WO_B}.input_scale", 0.51), sample=1).findings
    assert (finding.code, finding.confidence) == ("input-scale-is-amax", "medium")
    assert "divide by 2688" in finding.fix
    assert check(put(f"{WO_B}.input_scale", 0.49), sample=1).findings == ()


def swap_nibbles(content: Any) -> None:
    raw = content.raw(f"{W2}.weight")
    raw.copy_((raw >> 4) | (raw << 4))


def another_expert(content: Any) -> None:
    for part in ("weight", "weight_scale", "weight_scale_2"):
        content.tensors[f"{W2}.{part}"] = content.tensors[
            f"layers.1.ffn.experts.2.w2.{part}"
        ].clone()


AGAINST = {
    "one code of an expert": (byte(f"{W2}.weight", 0x71), "not-exact", f"{W2}.weight"),
    "one block scale of an expert": (byte(f"{W2}.weight_scale", 0x48), "not-exact",
                                     f"{W2}.weight"),
    "swapped nibbles": (swap_nibbles, "swapped-nibbles", f"{W2}.weight"),
    "another expert": (another_expert, "differs-from-reference", f"{W2}.weight"),
    "a factor of two": (scale(f"{WO_B}.weight_scale_2", 2.0), None, f"{WO_B}.weight"),
    "a lost global scale": (put(f"{WO_B}.weight_scale_2", 1.0), None, f"{WO_B}.weight"),
    "a norm": (scale("norm.weight", 1.01), "not-exact", "norm.weight"),
    "an FP8 byte": (byte("layers.0.attn.wo_a.weight", 0x33), "not-exact",
                    "layers.0.attn.wo_a.weight"),
    "a token id": (byte("layers.0.ffn.gate.tid2eid", 5, 0), "differs-from-reference",
                   "layers.0.ffn.gate.tid2eid"),
}  # fmt: skip


@pytest.mark.parametrize("case", AGAINST)
def test_faults_that_only_the_source_shows(check, only, tiny, case: str):
    change, code, tensor = AGAINST[case]
    found = only(check(change, sample="all", against=tiny))
    assert found[1] == tensor
    if code is not None:
        assert found[0] == code


def test_a_guess_becomes_certain_with_the_source(check, only, tiny):
    alone = check(e8m0_as_e4m3, sample="all")
    assert [f.confidence for f in alone.findings] == ["medium"]
    made = check(e8m0_as_e4m3, sample="all", against=tiny)
    assert only(made)[1] == f"{W2}.weight"
    assert made.findings[0].confidence == "certain"


def test_a_factor_common_to_a_pair_needs_the_source(check, tiny):
    """No byte is odd by itself, and the pair agrees; the exact cast does not."""
    change = both(scale(f"{W1}.weight_scale_2", 0.5), scale(f"{W3}.weight_scale_2", 0.5))
    assert check(change, sample="all").findings == ()
    made = check(change, sample="all", against=tiny)
    assert {f.tensor for f in made.findings} == {f"{W1}.weight", f"{W3}.weight"}


def both(*changes: Any) -> Any:
    return lambda content: [change(content) for change in changes]


def test_experts_that_were_rounded_twice(check, tiny):
    """The detour over BF16 that modelopt takes costs an expert 24 dB, not nothing."""
    from nvfp4_codec import dequantize_nvfp4, quantize_nvfp4

    def detour(content: Any) -> None:
        t = content.tensors
        for leaf in (W1, W3):
            t[f"{leaf}.weight_scale_2"] = t[f"{leaf}.weight_scale_2"] * 1.37
            old = dequantize_nvfp4(t[f"{leaf}.weight"], t[f"{leaf}.weight_scale"],
                                   t[f"{leaf}.weight_scale_2"] / 1.37)  # fmt: skip
            made = quantize_nvfp4(old, weight_scale_2=t[f"{leaf}.weight_scale_2"])
            t[f"{leaf}.weight"], t[f"{leaf}.weight_scale"] = made.weight, made.weight_scale

    findings = check(detour, sample="all", against=tiny).findings
    assert [(f.code, f.tensor) for f in findings] == [
        ("not-exact", f"{W1}.weight"),
        ("not-exact", f"{W3}.weight"),
    ]
    assert all("casts experts exactly" in f.fix for f in findings)
