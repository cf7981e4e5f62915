"""Faults that names, shapes and dtypes show: one finding each, at the tensor."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch

from nvfp4_codec.errors import CheckpointError

W2 = "layers.1.ffn.experts.3.w2"
WKV = "layers.2.attn.wkv"


def delete(name: str) -> Any:
    return lambda c: c.tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Any:
    return lambda c: c.tensors.update({name: tensor})


def cast(name: str, dtype: torch.dtype) -> Any:
    return lambda c: c.tensors.update({name: c.tensors[name].to(dtype)})


def view(name: str, dtype: torch.dtype) -> Any:
    return lambda c: c.tensors.update({name: c.tensors[name].view(dtype)})


def shrink(name: str) -> Any:
    return lambda c: c.tensors.update({name: c.tensors[name][:-1]})


def delete_all(pattern: str) -> Any:
    def change(content: Any) -> None:
        for name in fnmatch.filter(content.tensors, pattern):
            del content.tensors[name]

    return change


def swizzled_shape(content: Any) -> None:
    scale = content.tensors[f"{W2}.weight_scale"]  # [256, 8]
    content.tensors[f"{W2}.weight_scale"] = scale.reshape(-1)


CASES = {
    "a norm": (delete("layers.3.attn_norm.weight"), "missing-tensor", "layers.3.attn_norm.weight",
               "Export again"),
    "a packed weight": (delete(f"{W2}.weight"), "missing-weight", f"{W2}.weight_scale",
                        "Take the weight"),
    "block scales": (delete(f"{W2}.weight_scale"), "missing-weight-scale", f"{W2}.weight",
                     "quantizer's output"),
    "a global scale": (delete(f"{W2}.weight_scale_2"), "missing-weight-scale-2", f"{W2}.weight",
                       "quantizer's output"),
    "an activation scale": (delete(f"{W2}.input_scale"), "missing-tensor", f"{W2}.input_scale",
                            "Export again"),
    "all activation scales of a kind": (
        delete_all("layers.*.experts.*.w2.input_scale"), "missing-input-scale",
        "layers.0.ffn.experts.0.w2.weight", "calibration snapshot"),
    "an FP8 scale": (delete("layers.0.attn.wo_a.scale"), "missing-tensor",
                     "layers.0.attn.wo_a.scale", "Export again"),
    "a tensor of another model": (put("layers.0.attn.rotary.inv_freq", torch.ones(4)),
                                  "unknown-tensor", "layers.0.attn.rotary.inv_freq", "remove it"),
    "a layer too many": (put("layers.4.attn_norm.weight", torch.ones(256)), "unknown-tensor",
                         "layers.4.attn_norm.weight", "config.json"),
    "a second spelling": (
        put("layers.0.attn.wo_a.weight_scale_inv", torch.ones(2, 8).to(torch.float8_e8m0fnu)),
        "duplicate-tensor", "layers.0.attn.wo_a.weight_scale_inv", "remove one"),
    "shape of a norm": (shrink("layers.0.attn_norm.weight"), "shape-mismatch",
                        "layers.0.attn_norm.weight", "export it again"),
    "shape of a weight": (shrink("head.weight"), "shape-mismatch", "head.weight",
                          "export it again"),
    "shape of block scales": (shrink(f"{W2}.weight_scale"), "shape-mismatch", f"{W2}.weight",
                              "write both again"),
    "swizzled block scales": (swizzled_shape, "swizzled-scale", f"{W2}.weight", "Unswizzle"),
    "E8M0 block scales": (view(f"{W2}.weight_scale", torch.float8_e8m0fnu), "e8m0-read-as-e4m3",
                          f"{W2}.weight", "convert the weight from MXFP4"),
    "float block scales": (cast(f"{W2}.weight_scale", torch.float32), "scale-dtype",
                           f"{W2}.weight", "cast the scale back"),
    "a half activation scale": (cast(f"{W2}.input_scale", torch.bfloat16), "scale-dtype",
                                f"{W2}.input_scale", "export the tensor again"),
    "FP8 scales against scale_fmt": (cast("layers.0.attn.wo_a.scale", torch.float32),
                                     "scale-dtype", "layers.0.attn.wo_a.scale", "expected dtype"),
    "an integer norm": (cast("norm.weight", torch.int32), "dtype-mismatch", "norm.weight",
                        "expected dtype"),
    "float token ids": (cast("layers.0.ffn.gate.tid2eid", torch.float32), "dtype-mismatch",
                        "layers.0.ffn.gate.tid2eid", "expected dtype"),
    "a scale without quantization": (
        put("layers.1.ffn.gate.input_scale", torch.tensor(1.0)), "unexpected-scale",
        "layers.1.ffn.gate.input_scale", "remove it"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_fault_one_finding(check, only, case: str):
    change, code, tensor, fix = CASES[case]
    found = only(check(change))
    assert found[:2] == (code, tensor)
    assert fix in found[2]


def test_halves_of_a_fused_projection_in_two_formats(check, healthy):
    def mix(content: Any) -> None:
        for part in ("weight_scale", "weight_scale_2", "input_scale"):
            del content.tensors[f"{WKV}.{part}"]
        content.tensors[f"{WKV}.weight"] = healthy["official"].tensors[f"{WKV}.weight"]
        content.tensors[f"{WKV}.scale"] = healthy["official"].tensors[f"{WKV}.scale"]
        content.quantization["quantized_layers"][WKV] = {"quant_algo": "FP8_PB_WO"}

    (finding,) = check(mix).findings
    assert finding.code == "fused-format-mismatch"
    assert finding.tensor == "layers.2.attn.wq_a.weight"
    assert finding.found == f"NVFP4, and FP8 in {WKV}.weight"


def test_many_of_a_kind_are_one_finding_and_all_their_names_are_kept(check):
    made = check(delete_all("*attn_norm.weight"))
    by_kind = {finding.tensor: finding for finding in made.findings}
    assert list(by_kind) == ["layers.0.attn_norm.weight", "mtp.0.attn_norm.weight"]
    first = by_kind["layers.0.attn_norm.weight"]
    assert first.code == "missing-tensor"
    assert first.found.startswith("absent: 4 of layers.#.attn_norm.weight, the first")
    assert made.names["missing"] == (
        *(f"layers.{i}.attn_norm.weight" for i in range(4)), "mtp.0.attn_norm.weight",
    )  # fmt: skip


def test_names_of_two_schemes_are_refused(check):
    def mix(content: Any) -> None:
        content.tensors["model.layers.0.self_attn.q_a_norm.weight"] = content.tensors.pop(
            "layers.0.attn.q_norm.weight"
        )

    with pytest.raises(CheckpointError, match="names of different schemes"):
        check(mix)
