"""The patches, one file per function that they replace, in the order in which a run meets them."""

from __future__ import annotations

from ..patch import Patch
from . import (
    activation_scale,
    calibrate,
    export_amax,
    export_weight,
    fused_experts,
    load_calib_amax,
    quantized_weight,
    quantizer_forward,
    rms_norm,
    skip_generate,
    weight_scale,
    weight_scale_2,
)

PATCHES: tuple[Patch, ...] = (
    skip_generate.PATCH,
    rms_norm.PATCH,
    calibrate.PATCH,
    load_calib_amax.PATCH,
    quantizer_forward.PATCH,
    export_amax.PATCH,
    activation_scale.PATCH,
    fused_experts.PATCH,
    export_weight.PATCH,
    weight_scale.PATCH,
    weight_scale_2.PATCH,
    quantized_weight.PATCH,
)
