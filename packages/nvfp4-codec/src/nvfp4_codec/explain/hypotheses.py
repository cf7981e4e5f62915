"""The table of known convention errors, each with the experiment that tests it."""

from __future__ import annotations

from dataclasses import dataclass

from .experiment import Experiment, on_parts, rewritten
from .fits import block_factors, constant_factor, half_factors, truncated
from .readings import (
    drop_global,
    drop_sign,
    ggml_order,
    invert_global,
    scale_as_integer,
    shift_bias,
    subnormal_scales_as_normal,
    swap_nibbles,
    swap_scale_format,
    swizzled,
    transpose,
    unit_scales,
)
from .rounding import double_rounding, single_steps


@dataclass(frozen=True)
class Hypothesis:
    """One convention error.

    handicap_db: the more factors an experiment fits, the more it explains by chance; this
    much better it must be than a simpler explanation. Zero if nothing is fitted.
    """

    name: str
    meaning: str
    fix: str
    trials: Experiment
    handicap_db: float = 0.0


# Specific errors first: among equally good explanations the earlier one wins.
HYPOTHESES = (
    Hypothesis(
        "nibble-order",
        "the two values of each byte are swapped",
        "the even element belongs in the low nibble",
        rewritten(swap_nibbles),
    ),
    Hypothesis(
        "ggml-order",
        "the codes are in GGML's order of split halves",
        "read them with from_ggml_mxfp4 or from_ggml_nvfp4",
        rewritten(ggml_order),
    ),
    Hypothesis(
        "transposed",
        "rows and columns are exchanged",
        "transpose before quantizing: blocks run along K, the last dimension",
        rewritten(transpose),
    ),
    Hypothesis(
        "sign-lost",
        "the magnitudes agree, the signs are gone",
        "bit 3 of an E2M1 code is its sign",
        rewritten(drop_sign),
    ),
    Hypothesis(
        "swizzled-scales",
        "block scales in 128x4 tile order were read as linear, or the reverse",
        "use unswizzle_blockscale (swizzle only once, when loading into the kernel)",
        swizzled,
    ),
    Hypothesis(
        "reciprocal-global-scale",
        "the global scale was used in the wrong direction",
        "weight_global_scale (compressed-tensors) divides, weight_scale_2 multiplies: Divisor",
        on_parts(invert_global),
    ),
    Hypothesis(
        "missing-global-scale",
        "the global scale was not applied",
        "load weight_scale_2 and multiply by it",
        on_parts(drop_global),
    ),
    Hypothesis(
        "unit-scales",
        "block scales are ones",
        "the scales were never loaded or never filled in: check the names that were matched",
        on_parts(unit_scales),
    ),
    Hypothesis(
        "scale-format",
        "E8M0 scale bytes were read as E4M3, or the reverse",
        "MXFP4 scales (one per 32) are E8M0, NVFP4 scales (one per 16) are E4M3",
        rewritten(swap_scale_format),
    ),
    Hypothesis(
        "scale-as-integer",
        "scale bytes were converted as integers",
        "view the bytes as float8_e8m0fnu or float8_e4m3fn, do not cast them",
        rewritten(scale_as_integer),
    ),
    Hypothesis(
        "e4m3-subnormals",
        "E4M3 subnormals were decoded by the formula for normal numbers",
        "exponent field 0 means mantissa * 2^-9",
        on_parts(subnormal_scales_as_normal),
    ),
    Hypothesis(
        "e8m0-bias",
        "all values are off by a factor of four, as with the E8M0 bias 125",
        "E8M0 has the bias 127: add 2 to every scale byte of the old file; where no scale is E8M0, "
        "look for one (input_scale, a global scale) applied twice or not at all",
        rewritten(shift_bias),
    ),
    Hypothesis(
        "single-steps",
        "a few codes or scales differ by one step: another rounding",
        "look for a double rounding (float32 to bfloat16 to E4M3), or for another profile",
        single_steps,
    ),
    Hypothesis(
        "double-rounding",
        "values went to E4M3 by way of bfloat16",
        "round once, from float32",
        double_rounding,
    ),
    Hypothesis(
        "constant-factor",
        "all values are off by one factor",
        "look for a scale (input_scale, a global scale) applied twice or not at all",
        constant_factor,
        handicap_db=3.0,
    ),
    Hypothesis(
        "half-mismatch",
        "the upper and the lower half of the rows are off by different factors",
        "w1 and w3 (gate and up) were fused with one global scale: unify_weight_scale_2 first",
        half_factors,
        handicap_db=6.0,
    ),
    Hypothesis(
        "truncated-ue8m0",
        "block factors lie within one power of two: scales lost their mantissas",
        "round the scales up to powers of two and quantize again (scale_fmt='ue8m0')",
        truncated,
        handicap_db=12.0,
    ),
    Hypothesis(
        "block-factors",
        "each block is off by a factor of its own",
        "the codes agree, the block scales do not: compare how they were computed or loaded",
        block_factors,
        handicap_db=18.0,
    ),
)
