"""Transforms lose nothing, and refuse what no kernel could compute with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe_kernel import (
    ArchitectureError,
    DtypeError,
    ExpertWeights,
    LayoutError,
    MegaMoEWeights,
    RecipeError,
    ScaleError,
    ShapeError,
    fold_global_scale,
    transform_nvfp4_weights_for_mega_moe,
    untransform_nvfp4_weights,
)
from megamoe_kernel.weights import Arch
from nvfp4_codec import (
    Divisor,
    LosslessError,
    NVFP4Tensor,
    dequantize_nvfp4,
    quantize_nvfp4,
    swizzle_blockscale,
)

ARCHS: tuple[Arch, ...] = ("sm_100a", "sm_90a")


def _random(experts: int, rows: int, columns: int, parts: int) -> ExpertWeights:
    """Every byte of codes and every UE4M3 scale, from 0 to 448, occurs."""
    generator = torch.Generator().manual_seed(rows)
    shape = (experts, rows, columns // 2)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scale = torch.randint(
        0, 127, (experts, rows, columns // 16), generator=generator, dtype=torch.uint8
    )
    scale_2 = torch.rand(experts, parts, generator=generator) + 1e-4
    input_scale = torch.tensor(0.003) if parts == 1 else None
    return ExpertWeights(codes, scale.view(torch.float8_e4m3fn), scale_2, input_scale)


def _same(a: ExpertWeights, b: ExpertWeights) -> bool:
    scales = [x.weight_scale.view(torch.uint8) for x in (a, b)]
    return (
        torch.equal(a.weight, b.weight)
        and torch.equal(*scales)
        and torch.equal(a.weight_scale_2, b.weight_scale_2)
        and (a.input_scale is None) == (b.input_scale is None)
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [(1, 128, 128), (3, 256, 384)], ids=str)
def test_the_inverse_gives_every_bit_back(size: tuple[int, int, int], arch: Arch) -> None:
    experts, hidden, intermediate = size
    w13 = _random(experts, 2 * intermediate, hidden, 2)
    w2 = _random(experts, hidden, intermediate, 1)
    before = [t.clone() for t in (w13.weight, w2.weight)]
    l1, l2 = transform_nvfp4_weights_for_mega_moe(w13, w2, arch=arch)
    assert (l1.layer, l1.arch, l1.num_experts) == ("l1", arch, experts)
    assert (l1.rows, l1.columns, l2.rows, l2.columns) == (
        2 * intermediate, hidden, hidden, intermediate,
    )  # fmt: skip
    back = untransform_nvfp4_weights(l1, l2)
    assert _same(back[0], w13)
    assert _same(back[1], w2)
    assert torch.equal(w13.weight, before[0])
    assert torch.equal(w2.weight, before[1])
    # 72 bytes for 128 values, and nothing else that grows.
    values = 2 * (w13.weight.numel() + w2.weight.numel())
    assert l1.nbytes + l2.nbytes == values * 72 // 128 + 12 * experts


def test_sm100_scales_are_those_of_cutlass_on_the_moved_rows() -> None:
    """Rows of 128 keep their tile order of memory; test_layout_sm100 has the single addresses."""
    w13, w2 = _random(2, 256, 256, 2), _random(2, 256, 128, 1)
    l1, l2 = transform_nvfp4_weights_for_mega_moe(w13, w2, arch="sm_100a")
    assert l1.scale is not None
    assert l2.scale is not None
    order = [
        part * 128 + 16 * block + 2 * pair + parity
        for block in range(8)
        for parity in (0, 1)
        for part in (0, 1)
        for pair in range(8)
    ]
    assert torch.equal(l1.weight, w13.weight[:, order])
    moved = w13.weight_scale.view(torch.uint8)[:, order]
    assert torch.equal(l1.scale, swizzle_blockscale(moved, "utccp").data)
    assert l2.weight.data_ptr() == w2.weight.data_ptr()
    assert torch.equal(l2.scale, swizzle_blockscale(w2.weight_scale, "utccp").data)


@pytest.mark.parametrize("arch", ARCHS)
def test_tensors_of_single_experts_are_stacked(arch: Arch, make_layer: Any) -> None:
    layer = make_layer(3, 128, 128)
    up = layer.gate_up[1][1]
    divided = NVFP4Tensor(up.weight, up.weight_scale, Divisor.from_multiplier(up.weight_scale_2))
    layer.gate_up[1] = (layer.gate_up[1][0], divided)
    l1, l2 = transform_nvfp4_weights_for_mega_moe(
        layer.gate_up, layer.down, arch=arch, l2_input_scale=torch.tensor(0.01)
    )
    w13, w2 = untransform_nvfp4_weights(l1, l2)
    for e, (gate, up) in enumerate(layer.gate_up):
        assert torch.equal(w13.weight[e], torch.cat((gate.weight, up.weight)))
        assert l1.alpha[e, 0] == gate.weight_scale_2
    assert l1.alpha[1, 1] == divided.weight_scale_2.to_multiplier()  # type: ignore[union-attr]
    assert len({float(alpha) for alpha in l1.alpha.flatten()}) == 6
    assert torch.equal(w2.weight[2], layer.down[2].weight)
    assert l2.alpha[2, 0] == layer.down[2].weight_scale_2
    assert l2.input_scale == 0.01


@pytest.mark.parametrize("arch", ARCHS)
def test_strided_and_sliced_input(arch: Arch) -> None:
    w13, w2 = _random(4, 256, 128, 2), _random(4, 128, 128, 1)
    columns = torch.stack((w13.weight, w13.weight), -1)[..., 0]
    every_other = replace(w13, weight=columns).select(slice(0, 4, 2))
    l1, l2 = transform_nvfp4_weights_for_mega_moe(every_other, w2.select(slice(0, 4, 2)), arch=arch)
    back, _ = untransform_nvfp4_weights(l1, l2)
    assert _same(back, w13.select(slice(0, 4, 2)))


@pytest.mark.parametrize("arch", ARCHS)
def test_bytes_at_an_odd_address(arch: Arch) -> None:
    """Views into one buffer of a checkpoint file begin anywhere."""

    def moved(tensor: Tensor) -> Tensor:
        raw = tensor.view(torch.uint8)
        elsewhere = torch.empty(raw.numel() + 3, dtype=torch.uint8)[3:].view(raw.shape)
        return elsewhere.copy_(raw).view(tensor.dtype)

    w13, w2 = _random(2, 256, 128, 2), _random(2, 128, 128, 1)
    odd = [
        replace(w, weight=moved(w.weight), weight_scale=moved(w.weight_scale)) for w in (w13, w2)
    ]
    l1, l2 = transform_nvfp4_weights_for_mega_moe(odd[0], odd[1], arch=arch)
    for weights in (l1, l2):
        assert weights.weight.data_ptr() % 16 == 0
    back = untransform_nvfp4_weights(l1, l2)
    assert _same(back[0], w13)
    assert _same(back[1], w2)


def _fails(error: type[Exception], match: str, w13: Any, w2: Any, arch: Any = "sm_90a") -> None:
    with pytest.raises(error, match=match):
        transform_nvfp4_weights_for_mega_moe(w13, w2, arch=arch)


def _with_byte(weights: ExpertWeights, byte: int) -> ExpertWeights:
    raw = weights.weight_scale.view(torch.uint8).clone()
    raw[0, 3, 1] = byte
    return replace(weights, weight_scale=raw.view(torch.float8_e4m3fn))


@pytest.mark.parametrize("arch", ARCHS)
def test_scales_that_are_no_ue4m3_are_refused(arch: Arch) -> None:
    w13, w2 = _random(2, 256, 128, 2), _random(2, 128, 128, 1)
    nan, negative = "1 NaN and 0 negative", "0 NaN and 1 negative"
    for byte, found in ((0x7F, nan), (0xFF, nan), (0x80, negative), (0xC0, negative)):
        _fails(ScaleError, f"weight_scale of w13 has {found}", _with_byte(w13, byte), w2, arch)
        _fails(ScaleError, f"weight_scale of w2 has {found}", w13, _with_byte(w2, byte), arch)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        scale_2 = w13.weight_scale_2.clone()
        scale_2[1, 1] = bad
        _fails(ScaleError, "weight_scale_2 of w13 holds", replace(w13, weight_scale_2=scale_2), w2)
        _fails(
            ScaleError, "input_scale of w2 holds", w13, replace(w2, input_scale=torch.tensor(bad))
        )


def test_what_is_no_layer_is_refused(make_layer: Any) -> None:
    w13, w2 = _random(2, 256, 128, 2), _random(2, 128, 128, 1)
    layer = make_layer(2, 64, 32)
    _fails(
        ArchitectureError, "arch is 'sm_100', expected one of: sm_100a, sm_90a", w13, w2, "sm_100"
    )
    _fails(ShapeError, "hidden is 64, expected a positive multiple of 128", layer.w13, layer.w2)
    narrow = make_layer(1, 128, 32)
    _fails(ShapeError, "intermediate is 32", narrow.w13, narrow.w2)
    _fails(ShapeError, "w13 is 2 experts of 256x128 and w2 1 of", w13, _random(1, 128, 128, 1))
    _fails(ShapeError, r"weight_scale_2 of w13 has shape \(2, 1\)", w2, w2)
    _fails(ShapeError, r"weight_scale_2 of w2 has shape \(2, 2\)", w13, w13)
    _fails(DtypeError, "w13 is a NVFP4Tensor", layer.down[0], layer.down)
    _fails(DtypeError, "w13 holds a NVFP4Tensor, expected for each expert the pair", layer.down, w2)
    _fails(DtypeError, "w2 is a NVFP4Tensor", w13, layer.down[0])
    _fails(DtypeError, "expert 0 of w2 is a Tensor", w13, [layer.down[0].weight])
    _fails(ShapeError, "w2 has no experts", w13, [])
    _fails(ShapeError, "w13 has no experts", w13.select(slice(0)), w2.select(slice(0)))
    with pytest.raises(DtypeError, match="l2_input_scale is float"):
        transform_nvfp4_weights_for_mega_moe(
            w13,
            w2,
            arch="sm_90a",
            l2_input_scale=0.1,  # type: ignore[arg-type]
        )
    padded = quantize_nvfp4(torch.ones(128, 120), pad=True)
    _fails(ShapeError, "logical_k 120", w13, [padded])
    mixed = [layer.down[0], make_layer(1, 32, 64).down[0]]
    _fails(ShapeError, r"w2 has weights of shapes \[\(32, 32\), \(64, 16\)\]", w13, mixed)


def test_the_inverse_takes_one_layer_in_order(make_layer: Any) -> None:
    layer = make_layer(2, 128, 128)
    l1, l2 = transform_nvfp4_weights_for_mega_moe(layer.w13, layer.w2, arch="sm_100a")
    other, _ = transform_nvfp4_weights_for_mega_moe(layer.w13, layer.w2, arch="sm_90a")
    cases: list[tuple[Any, Any, str]] = [
        (l2, l1, "l1_weights was transformed as l2; l1 comes before l2"),
        (l1, l1, "l2_weights was transformed as l1"),
        (other, l2, "l1_weights are for sm_90a, l2_weights for sm_100a"),
        (None, l2, "l1_weights is a NoneType"),
        (l1, None, "l2_weights is a NoneType"),
    ]
    for first, second, match in cases:
        with pytest.raises(LayoutError, match=match):
            untransform_nvfp4_weights(first, second)


def test_experts_come_in_a_list(make_layer: Any) -> None:
    layer = make_layer(2, 128, 128)
    _fails(DtypeError, "w13 is a NoneType, expected ExpertWeights or a list", None, layer.w2)
    _fails(DtypeError, "w13 is a list_iterator", iter(layer.gate_up), layer.w2)
    _fails(DtypeError, "w2 is a list_iterator", layer.w13, iter(layer.down))


def test_malformed_experts_are_refused() -> None:
    w = _random(2, 256, 128, 2)
    for changes, error, match in (
        ({"weight": w.weight.view(torch.int8)}, DtypeError, "weight is torch.int8"),
        ({"weight": [1]}, DtypeError, "weight is list"),
        ({"weight": w.weight[0]}, ShapeError, "expected \\[E, N, K/2\\]"),
        ({"weight": w.weight[..., :4]}, ShapeError, "8 columns, expected a multiple of 16"),
        ({"weight_scale": w.weight_scale.view(torch.uint8)}, DtypeError, "weight_scale is"),
        ({"weight_scale": w.weight_scale[..., :4]}, ShapeError, "weight_scale has shape"),
        ({"weight_scale_2": w.weight_scale_2.double()}, DtypeError, "weight_scale_2 is"),
        ({"weight_scale_2": w.weight_scale_2[:, 0]}, ShapeError, "expected \\(2, 2\\) for w13"),
        ({"weight_scale_2": torch.tensor(1.0)}, ShapeError, "weight_scale_2 has shape \\(\\)"),
        ({"weight_scale_2": torch.ones(2, 3)}, ShapeError, "weight_scale_2 has shape \\(2, 3\\)"),
        ({"input_scale": torch.ones(2)}, ShapeError, "input_scale has shape"),
        ({"input_scale": 0.5}, DtypeError, "input_scale is float"),
        ({"weight": w.weight.to("meta")}, ShapeError, "scales are on cpu, weight on meta"),
    ):
        with pytest.raises(error, match=match):
            replace(w, **changes)
    moved = w.to("meta")
    assert {moved.weight.device.type, moved.weight_scale_2.device.type} == {"meta"}


def _at(weights: MegaMoEWeights, **changes: Any) -> Any:
    return lambda: replace(weights, **changes)


@pytest.mark.parametrize("arch", ARCHS)
def test_malformed_transformed_weights_are_refused(arch: Arch, make_layer: Any) -> None:
    layer = make_layer(2, 128, 128)
    l1, l2 = transform_nvfp4_weights_for_mega_moe(layer.w13, layer.w2, arch=arch)
    cases: list[tuple[Any, type[Exception], str]] = [
        (_at(l1, layer="l3"), LayoutError, "layer is 'l3'"),
        (_at(l1, arch="sm_100"), ArchitectureError, "arch is 'sm_100'"),
        (_at(l1, rows=200), ShapeError, "rows is 200"),
        (_at(l1, columns=256), ShapeError, r"(weight|scale) has shape"),
        (_at(l1, weight=l1.weight[:, :1]), ShapeError, "weight has shape"),
        (_at(l1, weight=l1.weight.int()), DtypeError, "weight is torch.int32"),
        (_at(l1, weight=None), DtypeError, "weight is NoneType"),
        (_at(l1, weight=l1.weight.to("meta")), ShapeError, "scales are on cpu, weight on meta"),
        (_at(l1, alpha=None), DtypeError, "alpha is NoneType"),
        (
            _at(l1, alpha=l1.alpha[:, :1]),
            ShapeError,
            r"alpha has shape \(2, 1\), expected \(2, 2\)",
        ),
        (_at(l1, alpha=l1.alpha.double()), DtypeError, "alpha is torch.float64"),
        (_at(l2, input_scale=0.5), DtypeError, "input_scale is float"),
        (_at(l2, input_scale=torch.ones(1)), ShapeError, "input_scale has shape"),
    ]
    if arch == "sm_90a":
        cases.append((_at(l1, scale=l1.alpha), LayoutError, "expected None: it is in weight"))
    else:
        cases.append((_at(l1, scale=None), DtypeError, "scale is NoneType"))
    for make, error, match in cases:
        with pytest.raises(error, match=match):
            make()


def test_tensors_without_values_are_refused(make_layer: Any) -> None:
    """A model on the meta device is one whose weights are still to be loaded."""
    layer = make_layer(1, 128, 128)
    w13, w2 = layer.w13.to("meta"), layer.w2.to("meta")
    for arch in ARCHS:
        _fails(ShapeError, "w13 is a meta tensor, which has no values; load", w13, w2, arch)
    with pytest.raises(ShapeError, match="l2_input_scale is a meta tensor"):
        transform_nvfp4_weights_for_mega_moe(
            layer.w13, layer.w2, arch="sm_90a", l2_input_scale=torch.tensor(1.0, device="meta")
        )
    with pytest.raises(ShapeError, match="weights is a meta tensor"):
        fold_global_scale(w2, into="bytes")
    sparse = layer.w2.weight.to_sparse()
    with pytest.raises(DtypeError, match="weight is torch.sparse_coo, expected a dense tensor"):
        replace(layer.w2, weight=sparse)


@pytest.mark.parametrize("into", ["alpha", "bytes"])
def test_only_stacked_experts_fold(into: Any, make_layer: Any) -> None:
    layer = make_layer(1, 128, 128)
    for value in (None, layer.down[0], layer.down, layer.w2.weight_scale):
        with pytest.raises(DtypeError, match=f"weights is a {type(value).__name__}, expected"):
            fold_global_scale(value, into=into)
    with pytest.raises(RecipeError, match="underflow is 'drop', expected 'error'"):
        fold_global_scale(layer.w2, into=into, underflow="drop")  # type: ignore[arg-type]
    folded, reports = fold_global_scale(layer.w2.select(slice(0)), into=into)
    assert (folded.num_experts, reports) == (0, [])


def test_folding_into_alpha_changes_nothing(make_layer: Any) -> None:
    layer = make_layer(2, 64, 32)
    folded, reports = fold_global_scale(layer.w13)
    assert folded is layer.w13
    assert len(reports) == 4
    assert all(report.exact and report.num_blocks == 32 * 4 for report in reports)


def _values(weights: ExpertWeights, expert: int, part: int) -> Tensor:
    rows = weights.rows // weights.num_parts
    at = slice(part * rows, (part + 1) * rows)
    return dequantize_nvfp4(
        weights.weight[expert, at],
        weights.weight_scale[expert, at],
        weights.weight_scale_2[expert, part],
        dtype=torch.float32,
    )


def test_folding_into_bytes_rounds_and_says_so(make_layer: Any) -> None:
    layer = make_layer(2, 64, 32, gain=300.0)
    folded, reports = fold_global_scale(layer.w13, into="bytes")
    assert torch.equal(folded.weight_scale_2, torch.ones(2, 2))
    assert torch.equal(folded.weight, layer.w13.weight)
    for index, report in enumerate(reports):
        at = divmod(index, 2)
        before, after = _values(layer.w13, *at), _values(folded, *at)
        nonzero = before != 0
        worst = ((after - before).abs()[nonzero] / before.abs()[nonzero]).max()
        assert 0.5 * report.num_blocks < report.inexact_blocks <= report.num_blocks
        assert float(worst) == pytest.approx(report.max_relative_error, abs=1e-6)
    assert 2**-5 < max(report.max_relative_error for report in reports) < 0.5
    assert fold_global_scale(folded, into="bytes")[1][0].exact


def test_folding_small_scales_is_refused_unless_asked_for(make_layer: Any) -> None:
    """Ordinary weights have global scales around 1e-4: as bytes many blocks would vanish."""
    layer = make_layer(1, 64, 32, gain=0.01)
    with pytest.raises(LosslessError, match="underflow"):
        fold_global_scale(layer.w2, into="bytes")
    folded, (report,) = fold_global_scale(layer.w2, into="bytes", underflow="zero")
    assert report.underflowed_blocks > 0
    assert int((folded.weight_scale.view(torch.uint8) == 0).sum()) >= report.underflowed_blocks


def test_folds_that_do_not_exist_are_refused(make_layer: Any) -> None:
    layer = make_layer(1, 64, 32)
    with pytest.raises(RecipeError, match="into is 'weights', expected 'alpha' or 'bytes'"):
        fold_global_scale(layer.w2, into="weights")  # type: ignore[arg-type]
    large = replace(layer.w2, weight_scale_2=torch.full((1, 1), 1.5))
    with pytest.raises(RecipeError, match="largest global scale is 1.5"):
        fold_global_scale(large, into="bytes")


class Calls(TorchDispatchMode):
    """Counts what torch is asked to do."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("arch", ARCHS)
def test_no_loop_goes_over_rows(arch: Arch) -> None:
    """Or a layer of Pro takes minutes; how long it takes is in benchmarks/transform.py."""
    counts = []
    for size in (128, 512):
        w13, w2 = _random(2, 2 * size, size, 2), _random(2, size, size, 1)
        transform_nvfp4_weights_for_mega_moe(w13, w2, arch=arch)  # tables are made once
        with Calls() as calls:
            transform_nvfp4_weights_for_mega_moe(w13, w2, arch=arch)
        counts.append(calls.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_weights_in_other_strides_are_refused(arch: Any, make_layer: Any) -> None:
    """Kernels read memory by the transform's own strides, not the tensor's."""
    layer = make_layer(2, 256, 128)
    l1, _ = transform_nvfp4_weights_for_mega_moe(layer.w13, layer.w2, arch=arch)

    def other(tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous().mT

    changes = {"weight": other(l1.weight), "alpha": other(l1.alpha)}
    if l1.scale is not None:
        changes["scale"] = l1.scale.contiguous()
    for name, tensor in changes.items():
        with pytest.raises(LayoutError, match=f"{name} does not lie in memory"):
            replace(l1, **{name: tensor})
    again = {name: getattr(l1, name).clone() for name in changes}
    assert torch.equal(replace(l1, **again).weight, l1.weight)
