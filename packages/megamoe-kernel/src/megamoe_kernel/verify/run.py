"""All checks in order, then the timings."""

from __future__ import annotations

import logging
from typing import get_args

import torch

from ..api import ACTIVATIONS
from ..reference import Activation
from .cases import CASES, PRO, TINY
from .checks import (
    check_layer,
    check_prepare_inputs,
    check_transforms,
    public_layer,
    scalar_layer,
)
from .machine import LAYOUTS, describe, required_target
from .ranks import check_gpus, check_ranks
from .report import Finding, Report
from .timing import time_prepare_inputs

_MOST_SCALAR_TOKENS = 64
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

logger = logging.getLogger(__name__)


def run_all(*, quick: bool, num_ranks: int = 1) -> Report:
    """Verify and time what there is for this GPU; BackendError where there is none."""
    target = required_target()
    check_gpus(num_ranks)
    arch, device = LAYOUTS[target], torch.device("cuda", torch.cuda.current_device())
    shapes = [(TINY, (1, 5, 33))] if quick else [(TINY, (1, 5, 33)), (PRO, (1, 64, 257))]
    logger.info("prepare_inputs")
    findings: list[Finding] = list(
        check_prepare_inputs(
            device,
            "kernel",
            [
                (tokens, shape.hidden, dtype)
                for shape, counts in shapes
                for tokens in counts
                for dtype in _DTYPES
            ],
        )
    )
    logger.info("transforms")
    findings += [check_transforms(device, arch, shape) for shape, _ in shapes]
    cases = [case for case in CASES if not quick or case.shape == TINY]
    logger.info("the layer")
    activation = ACTIVATIONS[arch]
    findings += check_layer("layer", public_layer(arch), activation, device, cases)
    logger.info("the layer without tensor cores")
    few = [case for case in cases if case.tokens <= _MOST_SCALAR_TOKENS]
    for activation in get_args(Activation):
        name = f"scalar layer, {activation}"
        findings += check_layer(name, scalar_layer, activation, device, few)
    if num_ranks > 1:
        logger.info("the layer on %d ranks", num_ranks)
        findings += check_ranks(num_ranks)
    logger.info("timings")
    timings = [] if quick else time_prepare_inputs(PRO, (1, 8, 64, 256, 1024, 8192))
    return Report(describe(target), findings, timings)
