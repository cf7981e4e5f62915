"""Decoding needs its output and nothing of that size beside it.

tenstorrent/tt-metal#38127: FP8 block scales were expanded to full size by repeat_interleave,
which doubled memory and time. Here the address space is capped a little above what the
process has before the call, so that a temporary of the output's size cannot be had at all.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nvfp4_codec.backends import available

SCRIPT = """
import resource
import torch
from nvfp4_codec import dequantize_fp8_block

torch.set_num_threads(1)
rows, cols = 4096, 4096
weight = torch.zeros(rows, cols, dtype=torch.uint8).fill_(0x38).view(torch.float8_e4m3fn)
scale = torch.full((32, 32), 0.5)
out = torch.empty(rows, cols, dtype=torch.bfloat16).fill_(1.0)
dequantize_fp8_block(weight[:256], scale[:2], out=out[:256], backend="native")  # starts threads

with open("/proc/self/statm") as statm:
    size = int(statm.read().split()[0]) * resource.getpagesize()
spare = out.nbytes // 20 + (1 << 20)
resource.setrlimit(resource.RLIMIT_AS, (size + spare, resource.RLIM_INFINITY))
try:
    dequantize_fp8_block(weight, scale, out=out, backend="native")
    try:
        torch.empty_like(out)
    except (MemoryError, RuntimeError):
        capped = True
    else:
        capped = False
finally:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert bool((out == 0.5).all()), "wrong values"
assert capped, "the cap does not bite"
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
def test_fp8_block_decoding_needs_five_percent_beside_its_output() -> None:
    if reason := available()["native"]:
        pytest.skip(f"the native backend is missing: {reason}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
