"""The native operations need their output and at most five per cent of it beside.

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
import sys
import torch
from nvfp4_codec import *

torch.set_num_threads(1)
ROWS, K = 4096, 8192
generator = torch.Generator().manual_seed(0)

def random_bytes(*shape):
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
codes = random_bytes(ROWS, K // 2)
decoded = torch.empty(ROWS, K, dtype=torch.bfloat16).fill_(1)
packed = torch.empty(ROWS, K // 2, dtype=torch.uint8).fill_(1)
scales = torch.empty(ROWS, K // 16, dtype=torch.uint8).fill_(1).view(e4m3)

if sys.argv[1] == "nvfp4_dequantize":
    block = random_bytes(ROWS, K // 16).view(e4m3)
    def run(rows):
        scale_2 = torch.tensor(0.01)
        dequantize_nvfp4(codes[:rows], block[:rows], scale_2, out=decoded[:rows], backend="native")
    outputs = [decoded]
elif sys.argv[1] == "nvfp4_quantize":
    x = torch.randn(ROWS, K, generator=generator).bfloat16()
    def run(rows):
        quantize_nvfp4(x[:rows], out=(packed[:rows], scales[:rows]), backend="native")
    outputs = [packed, scales]
elif sys.argv[1] == "mxfp4_dequantize":
    block = random_bytes(ROWS, K // 32).view(e8m0)
    def run(rows):
        dequantize_mxfp4(codes[:rows], block[:rows], out=decoded[:rows], backend="native")
    outputs = [decoded]
elif sys.argv[1] == "fp8_block_dequantize":
    weight = random_bytes(ROWS, K).view(e4m3)
    block = torch.rand(ROWS // 128, K // 128, generator=generator)
    def run(rows):
        scale, out = block[: rows // 128], decoded[:rows]
        dequantize_fp8_block(weight[:rows], scale, out=out, backend="native")
    outputs = [decoded]
elif sys.argv[1] == "mxfp4_to_nvfp4":
    block = (random_bytes(ROWS, K // 32) % 16 + 110).view(e8m0)
    def run(rows):
        out = packed[:rows], scales[:rows]
        mxfp4_to_nvfp4(codes[:rows], block[:rows], out=out, backend="native")
    outputs = [packed, scales]

run(256)  # starts the threads
for out in outputs:
    out.view(torch.uint8).fill_(0xAA)
with open("/proc/self/statm") as statm:
    size = int(statm.read().split()[0]) * resource.getpagesize()
total = sum(out.nbytes for out in outputs)
resource.setrlimit(resource.RLIMIT_AS, (size + total // 20 + (1 << 20), resource.RLIM_INFINITY))
try:
    run(ROWS)
    try:
        torch.empty(total, dtype=torch.uint8)
    except (MemoryError, RuntimeError):
        capped = True
    else:
        capped = False
finally:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert capped, "the cap does not bite"
for out in outputs:  # poisoned before; random data leaves no run of it
    last = out.view(torch.uint8)[-1]
    assert not (last == 0xAA).all(), "the last row was not written"
"""

OPERATIONS = (
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "mxfp4_dequantize",
    "fp8_block_dequantize",
    "mxfp4_to_nvfp4",
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_needs_five_percent_beside_its_output(operation: str) -> None:
    if reason := available()["native"]:
        pytest.skip(f"the native backend is missing: {reason}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, operation],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
