"""verify: each fault is made in a good checkpoint and found by name; good ones are silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4_codec import (
    dequantize_nvfp4,
    mxfp4_to_nvfp4,
    quantize_fp8_block,
    quantize_mxfp4,
    quantize_nvfp4,
)
from nvfp4_codec.checkpoint import (
    Checkpoint,
    Finding,
    contrast,
    find_families,
    inspect_checkpoint,
    verify_checkpoint,
)
from nvfp4_codec.checkpoint.deepseek_v4.activations import check_input_scale
from nvfp4_codec.checkpoint.heuristics import e4m3_table, unswizzled
from nvfp4_codec.checkpoint.reader import TensorInfo
from nvfp4_codec.checkpoint.verify import verify_family
from nvfp4_codec.swizzle import swizzle_blockscale

Tensors = dict[str, Tensor]
Break = Callable[[Tensors], None]
DOWN, GATE, UP = (f"layers.0.mlp.{name}_proj" for name in ("down", "gate", "up"))
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def check(
    tensors: Mapping[str, Tensor], folder: Path, reference: Mapping[str, Tensor] | None = None
) -> list[Finding]:
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors")
    with Checkpoint.open(folder / "model.safetensors") as source:
        inspect_checkpoint(source)  # a faulty weight is a row with a problem, not a crash
        if reference is None:
            return verify_checkpoint(source)
        save_file(dict(reference), folder / "reference.safetensors")
        with Checkpoint.open(folder / "reference.safetensors") as other:
            return verify_checkpoint(source, other)


def raw(tensors: Tensors, name: str) -> Tensor:
    """A writable uint8 view of a copied tensor."""
    tensors[name] = tensors[name].clone()
    return tensors[name].view(torch.uint8)


def swap_nibbles(weight: Tensor) -> Tensor:
    return (weight >> 4) | (weight << 4)


def nan_scale(t: Tensors) -> None:
    raw(t, f"{DOWN}.weight_scale")[3, 2] = 0x7F


def negative_scale(t: Tensors) -> None:
    raw(t, f"{DOWN}.weight_scale")[3, 2] |= 0x80


def no_weight_scale_2(t: Tensors) -> None:
    del t[f"{DOWN}.weight_scale_2"]


def no_weight_scale(t: Tensors) -> None:
    del t[f"{DOWN}.weight_scale"]


def ones(t: Tensors) -> None:
    raw(t, f"{DOWN}.weight_scale").fill_(0x38)


def e8m0_bytes(t: Tensors) -> None:
    """An MXFP4 scale written per 16 values under the NVFP4 label."""
    values = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    packed = quantize_mxfp4(values)
    t[f"{DOWN}.weight"] = packed.weight
    doubled = packed.weight_scale.view(torch.uint8).repeat_interleave(2, dim=1)
    t[f"{DOWN}.weight_scale"] = doubled.view(E4M3)


def e8m0_label(t: Tensors) -> None:
    t[f"{DOWN}.weight_scale"] = t[f"{DOWN}.weight_scale"].view(torch.uint8).view(E8M0)


def mxfp4_scale_as_e4m3(t: Tensors) -> None:
    packed = quantize_mxfp4(torch.randn(256, 128, generator=torch.Generator().manual_seed(1)))
    t[f"{DOWN}.weight"] = packed.weight
    t[f"{DOWN}.weight_scale"] = packed.weight_scale.view(torch.uint8).view(E4M3)
    del t[f"{DOWN}.weight_scale_2"]


def reciprocal(t: Tensors) -> None:
    t[f"{DOWN}.weight_scale_2"] = t[f"{DOWN}.weight_scale_2"].reciprocal()


def divisor_under_wrong_name(t: Tensors) -> None:
    for part in ("weight_packed", "weight_global_scale"):
        t[f"{DOWN}.{part}"] = t.pop(
            f"{DOWN}.{'weight' if part == 'weight_packed' else 'weight_scale_2'}"
        )


def one_weight_scale_2(t: Tensors) -> None:
    t[f"{DOWN}.weight_scale_2"] = torch.tensor(1.0)


def nan_weight_scale_2(t: Tensors) -> None:
    t[f"{DOWN}.weight_scale_2"] = torch.tensor(float("nan"))


def zero_weight_scale_2(t: Tensors) -> None:
    t[f"{DOWN}.weight_scale_2"] = torch.tensor(0.0)


def bf16_weight_scale_2(t: Tensors) -> None:
    t[f"{DOWN}.weight_scale_2"] = t[f"{DOWN}.weight_scale_2"].bfloat16()


def swizzled(t: Tensors) -> None:
    scale = t[f"{DOWN}.weight_scale"]
    data = swizzle_blockscale(scale).data.reshape(-1)
    t[f"{DOWN}.weight_scale"] = data.view(torch.uint8).view(E4M3).reshape(scale.shape).clone()


def swizzled_flat(t: Tensors) -> None:
    t[f"{DOWN}.weight_scale"] = t[f"{DOWN}.weight_scale"].reshape(-1).clone()


def swizzled_padded(t: Tensors) -> None:
    """130 rows and 6 scale columns swizzle to 256 x 8."""
    packed = quantize_nvfp4(torch.randn(130, 96, generator=torch.Generator().manual_seed(2)))
    t[f"{DOWN}.weight"] = packed.weight
    t[f"{DOWN}.weight_scale"] = torch.zeros(256, 8, dtype=torch.uint8).view(E4M3)


def wrong_shape(t: Tensors) -> None:
    t[f"{DOWN}.weight_scale"] = t[f"{DOWN}.weight_scale"][:, :-1].clone()


def gate_up_mismatch(t: Tensors) -> None:
    t[f"{UP}.weight_scale_2"] = t[f"{UP}.weight_scale_2"] * 1.5


def one_swapped(t: Tensors) -> None:
    t[f"{UP}.weight"] = swap_nibbles(t[f"{UP}.weight"])


def nan_weight(t: Tensors) -> None:
    t["norm.weight"] = t["norm.weight"].clone()
    t["norm.weight"][5] = float("nan")


def bf16_weight_scale(t: Tensors) -> None:
    t[f"{DOWN}.weight_scale"] = t[f"{DOWN}.weight_scale"].bfloat16()


def no_scales(t: Tensors) -> None:
    del t[f"{DOWN}.weight_scale"], t[f"{DOWN}.weight_scale_2"]


def e8m0_bytes_unpaired(t: Tensors) -> None:
    """One exponent per 16 values, as of a scale that was computed so."""
    scale = t[f"{DOWN}.weight_scale"].float() * t[f"{DOWN}.weight_scale_2"]
    exponents = scale.log2().round() + 127
    t[f"{DOWN}.weight_scale"] = exponents.to(torch.uint8).view(E4M3)


def tiny_weight_scale_2(t: Tensors) -> None:
    t[f"{DOWN}.weight_scale_2"] = torch.tensor(1e-45)


def tiny_fused_weight_scale_2(t: Tensors) -> None:
    t[f"{UP}.weight_scale_2"] = torch.tensor(1e-45)


def nan_double(t: Tensors) -> None:
    t["norm.weight"] = t["norm.weight"].double()
    t["norm.weight"][5] = float("nan")


BROKEN: dict[str, tuple[Break, str, str]] = {
    "NaN scale byte": (nan_scale, "nan-scale", DOWN),
    "negative scale byte": (negative_scale, "negative-scale", DOWN),
    "no weight_scale_2": (no_weight_scale_2, "missing-weight-scale-2", DOWN),
    "no weight_scale": (no_weight_scale, "missing-weight-scale", DOWN),
    "scales all ones": (ones, "scales-all-ones", DOWN),
    "E8M0 bytes as E4M3": (e8m0_bytes, "e8m0-read-as-e4m3", DOWN),
    "E8M0 label": (e8m0_label, "e8m0-read-as-e4m3", DOWN),
    "MXFP4 scale labelled E4M3": (mxfp4_scale_as_e4m3, "e8m0-read-as-e4m3", DOWN),
    "reciprocal": (reciprocal, "reciprocal-global-scale", DOWN),
    "multiplier named divisor": (divisor_under_wrong_name, "reciprocal-global-scale", DOWN),
    "weight_scale_2 one": (one_weight_scale_2, "weight-scale-2-is-one", DOWN),
    "weight_scale_2 NaN": (nan_weight_scale_2, "bad-global-scale", DOWN),
    "weight_scale_2 zero": (zero_weight_scale_2, "bad-global-scale", DOWN),
    "weight_scale_2 bfloat16": (bf16_weight_scale_2, "shape-mismatch", DOWN),
    "swizzled": (swizzled, "swizzled-scale", DOWN),
    "swizzled, 1-D": (swizzled_flat, "swizzled-scale", DOWN),
    "swizzled, padded": (swizzled_padded, "swizzled-scale", DOWN),
    "shape": (wrong_shape, "shape-mismatch", DOWN),
    "gate and up differ": (gate_up_mismatch, "fused-scale-mismatch", GATE),
    "one of gate and up swapped": (one_swapped, "swapped-nibbles", GATE),
    "NaN in a norm": (nan_weight, "nonfinite-weight", "norm"),
    "NaN in float64": (nan_double, "nonfinite-weight", "norm"),
    "weight_scale bfloat16": (bf16_weight_scale, "scale-dtype", DOWN),
    "no scales at all": (no_scales, "missing-weight-scale", DOWN),
    "E8M0 bytes, one per 16": (e8m0_bytes_unpaired, "e8m0-read-as-e4m3", DOWN),
    "weight_scale_2 tiny": (tiny_weight_scale_2, "bad-global-scale", DOWN),
    "fused weight_scale_2 tiny": (tiny_fused_weight_scale_2, "bad-global-scale", UP),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_found_by_name(
    name: str, nvfp4_tensors: Mapping[str, Tensor], tmp_path: Path
) -> None:
    damage, code, module = BROKEN[name]
    tensors = dict(nvfp4_tensors)
    damage(tensors)
    findings = check(tensors, tmp_path)
    assert [finding.code for finding in findings] == [code]
    (finding,) = findings
    assert finding.tensor.startswith(f"{module}.weight")
    assert finding.file == "model.safetensors"
    assert all((finding.found, finding.expected, finding.fix))


def test_an_mxfp4_scale_times_any_global_scale_is_silent(tmp_path: Path) -> None:
    """An exact cast in units of 0.3: pairs of equal bytes, powers of two apart, no exponents."""
    packed = quantize_mxfp4(random_matrix("heavy-tailed", 128, 256, 0))
    made = mxfp4_to_nvfp4(packed.weight, packed.weight_scale)
    scale = (made.weight_scale.float() / 0.3).clamp(max=300).to(E4M3)
    tensors = {
        "a.weight": made.weight,
        "a.weight_scale": scale,
        "a.weight_scale_2": made.weight_scale_2 * 0.3,
    }
    assert check(tensors, tmp_path) == []


@pytest.mark.parametrize(("count", "found"), [(2, []), (3, ["zero-scale"]), (2048, ["zero-scale"])])
def test_zero_scales_over_codes_that_are_not(
    nvfp4_tensors: Mapping[str, Tensor], tmp_path: Path, count: int, found: list[str]
) -> None:
    """Two of 2048 blocks may have come of rounding, three may not."""
    tensors = dict(nvfp4_tensors)
    assert tensors[f"{DOWN}.weight_scale"].numel() == 2048
    raw(tensors, f"{DOWN}.weight_scale").view(-1)[:count] = 0
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"] | 0x01
    assert [finding.code for finding in check(tensors, tmp_path)] == found


def test_zero_scales_over_zero_codes_are_silent(
    nvfp4_tensors: Mapping[str, Tensor], tmp_path: Path
) -> None:
    tensors = dict(nvfp4_tensors)
    raw(tensors, f"{DOWN}.weight_scale").view(-1)[:512] = 0
    raw(tensors, f"{DOWN}.weight").view(-1)[: 512 * 8] = 0x80  # -0 and +0
    assert check(tensors, tmp_path) == []


def test_a_good_checkpoint_is_silent(nvfp4_tensors: Mapping[str, Tensor], tmp_path: Path) -> None:
    assert check(nvfp4_tensors, tmp_path) == []


def random_matrix(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    if kind == "heavy-tailed":
        return normal * torch.randn(rows, columns, generator=generator).mul(1.5).exp()
    if kind == "row-scaled":
        return normal * torch.randn(rows, 1, generator=generator).mul(3).exp()
    if kind == "low-rank":
        return normal[:, :4] @ torch.randn(4, columns, generator=generator)
    if kind == "constant":
        return torch.full((rows, columns), 0.75)
    if kind == "small":
        return normal * 1e-6
    if kind == "large":
        return normal * 100
    return normal * 0.02


@pytest.mark.parametrize("shape", [(1, 16), (2, 32), (128, 64), (256, 512), (100, 48)], ids=str)
@pytest.mark.parametrize(
    "kind",
    ["normal", "heavy-tailed", "row-scaled", "low-rank", "constant", "small", "large"],
)
def test_good_weights_of_every_kind_and_size_are_silent(
    kind: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    tensors: Tensors = {}
    for i, name in enumerate(("q_proj", "k_proj", "w2")):
        values = random_matrix(kind, *shape, seed=i)
        packed = quantize_nvfp4(
            values,
            weight_scale_2=torch.tensor(
                400.0 if kind == "row-scaled" else float(random_matrix(kind, *shape, 0).abs().max())
            )
            / 2688,
        )
        assert isinstance(packed.weight_scale_2, Tensor)
        tensors |= {
            f"{name}.weight": packed.weight,
            f"{name}.weight_scale": packed.weight_scale,
            f"{name}.weight_scale_2": packed.weight_scale_2,
        }
        if shape[1] % 32 == 0:
            mxfp4 = quantize_mxfp4(values)
            tensors[f"mx.{name}.weight"], tensors[f"mx.{name}.scale"] = mxfp4
    # A constant of 0.75 has the MXFP4 scale 2^-3 everywhere, and nothing is wrong with that.
    assert check(tensors, tmp_path) == []


def test_all_zero_weights_are_silent(tmp_path: Path) -> None:
    packed = quantize_nvfp4(torch.zeros(32, 64), zero_amax="one")
    assert isinstance(packed.weight_scale_2, Tensor)
    tensors = {
        "a.weight": packed.weight,
        "a.weight_scale": packed.weight_scale,
        "a.weight_scale_2": packed.weight_scale_2,
    }
    assert check(tensors, tmp_path) == []


def test_mxfp4_and_fp8_faults(tmp_path: Path) -> None:
    packed = quantize_mxfp4(random_matrix("normal", 64, 64, 0))
    scale = packed.weight_scale.view(torch.uint8)
    nan, as_e4m3 = scale.clone(), scale.clone()
    nan[1, 1] = 255
    as_e4m3[:] = torch.arange(0x50, 0x50 + 128).clamp(max=0x7E).view(64, 2)[:, :2]
    fp8 = random_matrix("normal", 64, 64, 1).to(E4M3)
    bad = fp8.clone()
    bad.view(torch.uint8)[0, 0] = 0xFF
    tensors = {
        "nan.weight": packed.weight,
        "nan.scale": nan.view(E8M0),
        "spread.weight": packed.weight,
        "spread.scale": as_e4m3.view(E8M0),
        "ones.weight": packed.weight,
        "ones.scale": torch.full_like(scale, 127).view(E8M0),
        "fp8.weight": bad,
        "fp8.weight_scale_inv": torch.tensor([[0.5]]),
        "fp8b.weight": fp8,
        "fp8b.weight_scale": torch.tensor([[-1.0]]),
        "fp8c.weight": fp8,
        "fp8c.weight_scale": torch.ones(64, 1),
        "fp8e.weight": fp8,
        "fp8e.weight_scale_inv": torch.tensor([[104]], dtype=torch.uint8).view(E4M3).float(),
        "fp8f.weight": fp8,
        "fp8f.weight_scale_inv": torch.tensor([[23.1]]),
        "fp8d.weight": fp8,
        "fp8d.weight_scale_inv": torch.ones(3, 1, 2),
    }
    assert {(f.tensor.partition(".")[0], f.code) for f in check(tensors, tmp_path)} == {
        ("nan", "nan-scale"),
        ("spread", "e4m3-read-as-e8m0"),
        ("ones", "scales-all-ones"),
        ("fp8", "nonfinite-weight"),
        ("fp8b", "bad-scale"),
        ("fp8c", "scales-all-ones"),
        ("fp8d", "shape-mismatch"),
        ("fp8e", "e8m0-read-as-e4m3"),
        ("fp8f", "bad-scale"),
    }


@pytest.mark.parametrize("kind", ["fp8", "fp8-float", "mxfp4"])
@pytest.mark.parametrize("byte", [0, 1, 60, 200, 254])
def test_absurd_scales(kind: str, byte: int, tmp_path: Path) -> None:
    """Exponents that make weights of 1e-36 or 1e20; float scales of the same size."""
    found = check(absurdly_scaled(kind, byte, random_matrix("normal", 256, 256, 0)), tmp_path)
    assert [(f.code, f.tensor, f.confidence) for f in found] == [("bad-scale", "a.weight", "high")]
    assert found[0].file == "model.safetensors"
    assert "which make weights of up to" in found[0].found


def absurdly_scaled(kind: str, byte: int, values: Tensor) -> Tensors:
    if kind == "mxfp4":
        packed = quantize_mxfp4(values)
        scale = torch.full_like(packed.weight_scale.view(torch.uint8), byte).view(E8M0)
        return {"a.weight": packed.weight, "a.scale": scale}
    weight, exponents = values.to(E4M3), torch.full((2, 2), byte, dtype=torch.uint8)
    if kind == "fp8":
        return {"a.weight": weight, "a.scale": exponents.view(E8M0)}
    return {"a.weight": weight, "a.weight_scale_inv": torch.full((2, 2), 2.0 ** (byte - 127))}


@pytest.mark.parametrize("kind", ["fp8", "fp8-float", "mxfp4"])
@pytest.mark.parametrize("byte", [0, 60])
def test_scales_next_to_zero_over_zero_codes_are_silent(
    kind: str, byte: int, tmp_path: Path
) -> None:
    """A block of zeros has any scale; -0 is zero too."""
    tensors = absurdly_scaled(kind, byte, torch.zeros(256, 256))
    raw(tensors, "a.weight").view(-1)[:100] = 0x88 if kind == "mxfp4" else 0x80
    assert check(tensors, tmp_path) == []


def test_random_bytes_as_fp8_scales(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.randint(0, 255, (8, 8), dtype=torch.uint8, generator=generator)
    tensors = {
        "a.weight": random_matrix("normal", 1024, 1024, 0).to(E4M3),
        "a.scale": scale.view(E8M0),
    }
    assert [finding.code for finding in check(tensors, tmp_path)] == ["bad-scale"]


@pytest.mark.parametrize("byte", [69, 90, 126, 131])
def test_small_and_large_fp8_weights_are_silent(byte: int, tmp_path: Path) -> None:
    """From 1e-15 to 7168."""
    tensors = absurdly_scaled("fp8", byte, random_matrix("normal", 256, 256, 0))
    assert check(tensors, tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda t: t.update({f"{DOWN}.weight": swap_nibbles(t[f"{DOWN}.weight"])}),
         "swapped-nibbles"),
        (swizzled, "swizzled-scale"),
        (reciprocal, "reciprocal-global-scale"),
    ],
)  # fmt: skip
def test_a_reference_makes_it_certain(
    damage: Break, code: str, tmp_path: Path, weight: Callable[..., Tensor]
) -> None:
    values = weight(256, 128, 5)
    packed = quantize_nvfp4(values)
    assert isinstance(packed.weight_scale_2, Tensor)
    tensors = {
        f"{DOWN}.weight": packed.weight,
        f"{DOWN}.weight_scale": packed.weight_scale,
        f"{DOWN}.weight_scale_2": packed.weight_scale_2,
    }
    reference = {f"{DOWN}.weight": values}
    assert check(tensors, tmp_path, reference) == []
    damage(tensors)
    assert code in [f.code for f in check(tensors, tmp_path, reference)]
    assert [f.code for f in check({"x.weight": values}, tmp_path, reference)] == ["missing-tensor"]


def test_scales_whose_weight_is_absent(nvfp4_tensors: Mapping[str, Tensor], tmp_path: Path) -> None:
    tensors = {n: t for n, t in nvfp4_tensors.items() if n != f"{DOWN}.weight"}
    (finding,) = check(tensors, tmp_path)
    assert (finding.code, finding.tensor) == ("missing-weight", f"{DOWN}.weight_scale")
    del tensors[f"{DOWN}.weight_scale"]
    (finding,) = check(tensors, tmp_path)
    assert (finding.code, finding.tensor) == ("missing-weight", f"{DOWN}.weight_scale_2")


def test_other_peoples_packings_are_silent(tmp_path: Path) -> None:
    """bitsandbytes' NF4, int8 with float scales, GPTQ-like and a mask."""
    tensors = {
        "a.weight": torch.ones(512, 16, dtype=torch.uint8),
        "a.weight.absmax": torch.ones(128, dtype=torch.uint8),
        "b.weight": torch.ones(32, 32, dtype=torch.int8),
        "b.weight_scale": torch.full((32, 1), 0.5),
        "c.weight_packed": torch.ones(32, 4, dtype=torch.int32),
        "c.weight_scale": torch.ones(32, 2).bfloat16(),
        "d.mask": torch.ones(16, 16, dtype=torch.uint8),
        "e.scale": torch.ones(16),
    }
    assert check(tensors, tmp_path) == []


def test_weights_without_rows_or_of_odd_width_are_no_crash(tmp_path: Path) -> None:
    def packed(rows: int, columns: int) -> Tensors:
        return {
            "weight": torch.ones(rows, columns // 2, dtype=torch.uint8),
            "weight_scale": torch.ones(rows, -(-columns // 16)).to(E4M3),
            "weight_scale_2": torch.tensor(0.001),
        }

    tensors = {"a.k_proj.weight": torch.randn(4, 33), "a.v_proj.weight": torch.ones(0, 32)}
    for name in ("a.q_proj", "b"):
        tensors |= {f"{name}.{part}": value for part, value in packed(0, 32).items()}
    tensors |= {f"a.v_proj.{part}": value for part, value in packed(4, 32).items()}
    tensors |= {f"c.{part}": value for part, value in packed(128, 88).items()}
    for name in ("d.q_proj", "d.v_proj"):
        tensors |= {f"{name}.{part}": value for part, value in packed(4, 64).items()}
    tensors["d.k_proj.weight"] = torch.randn(4, 33)
    assert [f for f in check(tensors, tmp_path) if f.code != "scales-all-ones"] == []


@pytest.mark.parametrize(
    ("damage", "code", "confidence"),
    [
        (nan_scale, "nan-scale", "certain"),
        (ones, "scales-all-ones", "high"),
        (reciprocal, "reciprocal-global-scale", None),
        (tiny_weight_scale_2, "bad-global-scale", "high"),
        (nan_weight_scale_2, "bad-global-scale", "certain"),
        (e8m0_bytes_unpaired, None, "certain"),
    ],
)
def test_one_cause_is_one_finding_with_a_reference(
    damage: Break, code: str | None, confidence: str | None, tmp_path: Path,
    weight: Callable[..., Tensor],
) -> None:  # fmt: skip
    values = weight(256, 128, 64)
    packed = quantize_nvfp4(values)
    assert isinstance(packed.weight_scale_2, Tensor)
    tensors = {
        f"{DOWN}.weight": packed.weight,
        f"{DOWN}.weight_scale": packed.weight_scale,
        f"{DOWN}.weight_scale_2": packed.weight_scale_2,
    }
    damage(tensors)
    (finding,) = check(tensors, tmp_path, {f"{DOWN}.weight": values})
    assert code in (None, finding.code)
    assert confidence in (None, finding.confidence)


def test_the_reference_says_which_of_a_fused_pair_is_swapped(
    nvfp4_tensors: Mapping[str, Tensor], tmp_path: Path, weight: Callable[..., Tensor]
) -> None:
    tensors = dict(nvfp4_tensors)
    reference = {f"{GATE}.weight": weight(256, 128, 60), f"{UP}.weight": weight(256, 128, 61, True)}
    one_swapped(tensors)
    (finding,) = check(tensors, tmp_path, reference)
    assert (finding.code, finding.tensor) == ("swapped-nibbles", f"{UP}.weight")


def test_the_contrast_of_columns_is_that_of_the_values(
    nvfp4_tensors: Mapping[str, Tensor], tmp_path: Path
) -> None:
    save_file({n: t.clone() for n, t in nvfp4_tensors.items()}, tmp_path / "m.safetensors")
    with Checkpoint.open(tmp_path / "m.safetensors") as source:
        families = [f for f in find_families(source.tensors) if f.module == DOWN]
        values = dequantize_nvfp4(
            *(nvfp4_tensors[f"{DOWN}.{p}"] for p in ("weight", "weight_scale", "weight_scale_2")),
            dtype=torch.float32,
        )
        energy = values.double().square().sum(0).log()
        expected = (energy[0::2] - energy[1::2]).numpy()
        assert np.allclose(contrast.contrast(source, families[0]), expected, rtol=1e-4, atol=1e-5)
        sampled = contrast.contrast(source, families[0], 64 * 128)  # of 256 rows
    assert not np.allclose(sampled, expected, rtol=1e-4)
    assert np.corrcoef(sampled, expected)[0, 1] > 0.9


def test_the_e4m3_table_here_is_the_librarys() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(E4M3).float().numpy()
    table = e4m3_table()
    assert np.array_equal(table.view(np.uint32)[:127], expected.view(np.uint32)[:127])
    assert np.array_equal(table, expected, equal_nan=True)
    assert np.signbit(table[0x80])


def test_the_unswizzle_here_is_the_librarys() -> None:
    scale = torch.arange(256 * 8, dtype=torch.int64).remainder(251).to(torch.uint8).view(256, 8)
    stored = swizzle_blockscale(scale.view(E4M3)).data.view(torch.uint8).reshape(256, 8)
    assert np.array_equal(unswizzled(stored.numpy()), scale.numpy())


def test_a_limit_bounds_what_is_read_of_plain_and_fp8_values(tmp_path: Path) -> None:
    """Runs from the first value to the last; what lies between them is not seen."""
    values = torch.zeros(1 << 20, dtype=torch.float32)
    fp8 = torch.zeros(1024, 1024).to(E4M3)
    for position, seen in ((0, True), ((1 << 20) - 1, True), (100_000, False)):
        plain, coded = values.clone(), fp8.clone()
        plain[position] = float("nan")
        coded.view(torch.uint8).view(-1)[position] = 0x7F
        tensors = {"norm.weight": plain, "a.weight": coded, "a.scale": torch.ones(8, 8)}
        save_file(tensors, tmp_path / "model.safetensors")
        with Checkpoint.open(tmp_path / "model.safetensors") as source:
            for family in find_families(source.tensors):
                codes = {f.code for f in verify_family(source, family, 1 << 16)}
                assert ("nonfinite-weight" in codes) is seen
                assert "nonfinite-weight" in {f.code for f in verify_family(source, family)}


def test_the_contrast_of_fp8_columns(tmp_path: Path) -> None:
    """Scales are those of a whole block of columns, so the codes tell."""
    generator = torch.Generator().manual_seed(3)
    loud = torch.randn(1, 256, generator=generator).exp()
    values = torch.randn(256, 256, generator=generator) * loud
    packed = quantize_fp8_block(values)
    save_file(
        {"a.weight": packed.weight, "a.scale": packed.weight_scale, "b.weight": values},
        tmp_path / "model.safetensors",
    )
    with Checkpoint.open(tmp_path / "model.safetensors") as source:
        a, b = find_families(source.tensors)
        assert (a.kind, b.kind) == ("fp8-block", "plain")
        assert contrast.can_contrast(a)
        profiles = contrast.contrast(source, a), contrast.contrast(source, b)
    assert np.corrcoef(*profiles)[0, 1] > 0.99


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (1e-30, "implausible-input-scale"),
        (1e-10, "implausible-input-scale"),
        (1e-6 / 2600, None),
        (1e-4 / 2688, None),
        (0.01, None),
        (400.0, "implausible-input-scale"),
    ],
)
def test_input_scales_of_no_activations(value: float, code: str | None) -> None:
    info = TensorInfo("a.input_scale", "F32", (), "model.safetensors", 0, 4)
    found = check_input_scale(info, value)
    assert [(f.code, f.tensor, f.confidence) for f in found] == (
        [] if code is None else [(code, "a.input_scale", "high")]
    )
