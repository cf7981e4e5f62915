"""The small parts of the transform: fused scales, widening, and what the report adds up."""

from __future__ import annotations

import math

import pytest
import torch

from nvfp4_codec.convert import RequantizationReport, Unified
from nvfp4_codec.errors import ScaleError
from vllm_dsv4.transform.fused import with_one_scale
from vllm_dsv4.transform.padding import pad_shared, padded_inner
from vllm_dsv4.transform.report import Requantized, Tally, TransformReport


def _scales(scale_2: float, input_scale: float) -> dict[str, torch.Tensor]:
    return {
        "weight_scale": torch.full((2, 1), 2.0).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(scale_2),
        "input_scale": torch.tensor(input_scale),
    }


def test_input_scales_alone_may_disagree() -> None:
    made, cost = with_one_scale({"w1": _scales(0.5, 1.0), "w3": _scales(0.5, 3.0)}, {})
    assert {float(parts["input_scale"]) for parts in made.values()} == {3.0}
    assert {float(parts["weight_scale"].float().max()) for parts in made.values()} == {2.0}
    assert cost == ()


def test_scales_that_agree_are_the_same_tensors() -> None:
    scales = {"w1": _scales(0.5, 1.0), "w3": _scales(0.5, 1.0)}
    made, cost = with_one_scale(scales, {})
    assert cost == ()
    assert all(made[one][part] is scales[one][part] for one in scales for part in scales[one])


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_must_be_positive_and_finite(wrong: float) -> None:
    with pytest.raises(ScaleError, match="weight_scale_2 of w3"):
        with_one_scale({"w1": _scales(0.5, 1.0), "w3": _scales(wrong, 1.0)}, {})


@pytest.mark.parametrize(
    ("inner", "tp", "padded"), [(256, 2, 256), (128, 2, 256), (3072, 8, 3072), (2048, 3, 2304)]
)
def test_as_many_whole_blocks_for_every_rank(inner: int, tp: int, padded: int) -> None:
    assert padded_inner(inner, tp) == padded


@pytest.mark.parametrize(
    ("dtype", "part", "filled"),
    [
        (torch.bfloat16, "weight", 0.0),
        (torch.float32, "scale", 1.0),
        (torch.float8_e4m3fn, "weight_scale", 0.0),
        (torch.float8_e8m0fnu, "scale", 1.0),
    ],
)
def test_what_widens_a_tensor(dtype: torch.dtype, part: str, filled: float) -> None:
    tensor = torch.full((3, 4), 2.0).to(dtype)
    wide = pad_shared(tensor, part, "w1", inner=192, padded=256)
    assert wide.shape == (4, 4)
    assert wide.dtype == dtype
    assert torch.equal(wide[:3].float(), tensor.float())
    assert set(wide[3].float().tolist()) == {filled}
    assert pad_shared(tensor, part, "w2", inner=128, padded=256).shape == (3, 8)


def test_what_need_not_be_wider_is_not_copied() -> None:
    tensor = torch.ones(2, 2)
    assert pad_shared(tensor, "weight", "w1", inner=128, padded=128) is tensor


def test_the_worst_linear_counts() -> None:
    tally = Tally()
    for error, sqnr in ((0.1, 30.0), (0.3, 20.0), (0.2, 25.0)):
        tally.requantize("attn.wo_a", RequantizationReport(16, 4, 1.0, error, sqnr))
    worst = tally.report().requantized["attn.wo_a"]
    assert (worst.linears, worst.max_relative_error, worst.sqnr_db) == (3, 0.3, 20.0)


def test_a_report_does_not_change_afterwards() -> None:
    tally = Tally()
    tally.layers["attn.wq_a", "nvfp4", "nvfp4"] += 1
    tally.dropped["position_bias"] += 2
    tally.padded = 3
    report = tally.report()
    tally.layers["attn.wq_a", "nvfp4", "nvfp4"] += 1
    tally.dropped["position_bias"] += 1
    tally.requantize("attn.wo_a", RequantizationReport(1, 1, 1.0, 1.0, 1.0))
    assert report == TransformReport(
        {("attn.wq_a", "nvfp4", "nvfp4"): 1}, dropped={"position_bias": 2}, padded=3
    )


def test_the_table() -> None:
    report = TransformReport(
        {("b.wo_a", "nvfp4", "fp8_block"): 2, ("a.wq_a", "nvfp4", "nvfp4"): 10},
        unified={"a.wq_a": Unified(3, 64, 5, 1, 0.0625), "b.wo_a": Unified(1, 8, 0)},
        # A path may run in two ways: what was converted tells of rounding, the other does not.
        requantized={"b.wo_a": Requantized(1, 0.1, 21.5), "a.wq_a": Requantized(1, 0.1, 9.0)},
    )
    assert report.table().splitlines() == [
        "path    layers  stored  runs as",
        "a.wq_a  10      nvfp4   nvfp4      3 fused groups had two weight_scale_2: 5 of 64 blocks "
        "rounded by up to 6.25%, 1 vanished",
        "b.wo_a  2       nvfp4   fp8_block  worst SQNR 21.5 dB; 1 fused groups had two "
        "weight_scale_2: 0 of 8 blocks rounded by up to 0.00%",
    ]
