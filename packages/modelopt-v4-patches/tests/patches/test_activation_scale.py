"""The activation scale of quantizers that met no token."""

import logging
from importlib import import_module
from typing import Any

import pytest
import torch

from modelopt_v4_patches import apply_patches
from modelopt_v4_patches.patches import activation_scale
from modelopt_v4_patches.patches.modelopt import nvfp4_quantizer

pytestmark = pytest.mark.filterwarnings("ignore:.*zero or NaN at export.*:UserWarning")


def scale_of(quantizer: Any) -> Any:
    module: Any = import_module(activation_scale.MODULE)
    return module.NVFP4QTensor.get_activation_scaling_factor(quantizer)


@pytest.mark.parametrize("amax", [0.0, float("nan")])
def test_zero_and_nan_become_the_largest_value(
    amax: float, caplog: pytest.LogCaptureFixture
) -> None:
    needed = activation_scale.PATCH.needed()
    quantizer = nvfp4_quantizer(torch.tensor(amax))
    if needed:
        with pytest.raises(AssertionError, match="not positive"):
            scale_of(quantizer)
    apply_patches()
    with caplog.at_level(logging.WARNING):
        scale = scale_of(quantizer)
    assert scale.dtype == torch.float32
    assert scale.item() == torch.tensor(6.0 / (6 * 448)).item()  # what modelopt 0.47 gives
    assert ("1 of 1 input amax" in caplog.text) is needed


def test_good_amax_are_as_without_the_patch() -> None:
    values = (torch.rand(100) * 50).bfloat16()
    before = [scale_of(nvfp4_quantizer(value)) for value in values]
    apply_patches()
    after = [scale_of(nvfp4_quantizer(value)) for value in values]
    assert torch.equal(torch.stack(before), torch.stack(after))


def test_negative_amax_still_fail() -> None:
    apply_patches()
    with pytest.raises(AssertionError, match="not positive"):
        scale_of(nvfp4_quantizer(torch.tensor([0.0, -1.0])))


def test_no_scale_without_amax_or_when_disabled() -> None:
    apply_patches()
    assert scale_of(nvfp4_quantizer()) is None
    quantizer = nvfp4_quantizer(torch.tensor(0.0))
    quantizer.disable()
    assert scale_of(quantizer) is None


def test_the_probe_leaves_logging_as_it_was() -> None:
    activation_scale.PATCH.needed()
    assert not activation_scale.logger.disabled
