"""Layouts are the same in a GPU's memory as in the CPU's."""

from __future__ import annotations

import pytest
import torch

from nvfp4_codec import (
    from_ggml_mxfp4,
    from_ggml_nvfp4,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    swizzle_blockscale,
    to_ggml_mxfp4,
    to_ggml_nvfp4,
    unswizzle_blockscale,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", ["tile_128x4", "mn_major", "utccp"])
@pytest.mark.parametrize("shape", [(128, 4), (256, 9), (3, 384, 448)], ids=str)
def test_swizzled_scales(shape: tuple[int, ...], layout: str) -> None:
    linear = torch.randint(0, 0x7F, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    cpu, gpu = (swizzle_blockscale(x, layout) for x in (linear, linear.cuda()))
    assert gpu.data.stride() == cpu.data.stride()
    as_integers = torch.uint8 if layout == "tile_128x4" else torch.int32
    assert torch.equal(gpu.data.view(as_integers).cpu(), cpu.data.view(as_integers))
    back = unswizzle_blockscale(gpu)
    assert torch.equal(back.cpu().view(torch.uint8), linear.view(torch.uint8))


def test_packed_float32_scales() -> None:
    scale = torch.exp2(torch.randint(-20, 20, (130, 7)).float())
    packed = get_mn_major_tma_aligned_packed_ue8m0_tensor(scale.cuda())
    assert packed.stride() == (1, 132)
    assert torch.equal(packed.cpu(), get_mn_major_tma_aligned_packed_ue8m0_tensor(scale))


def test_ggml_records() -> None:
    mx = torch.randint(0, 255, (5, 51), dtype=torch.uint8)
    assert torch.equal(to_ggml_mxfp4(from_ggml_mxfp4(mx.cuda())).cpu(), mx)
    nv = torch.randint(0, 0x7F, (5, 72), dtype=torch.uint8)
    records, _ = to_ggml_nvfp4(from_ggml_nvfp4(nv.cuda(), torch.tensor(1.0)))
    assert torch.equal(records.cpu(), nv)
