"""Allocating, using again and giving back; groups that cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe_kernel import (
    BackendError,
    LayoutError,
    ShapeError,
    SymmBuffer,
    get_symm_buffer_for_nvfp4_mega_moe,
    prepare_inputs,
    quantize_tokens,
)
from megamoe_kernel.buffer_sizes import layer_layout, size_heads, size_rows
from megamoe_kernel.models import MODELS, MoEShape
from megamoe_kernel.nvlink import Place, check_one_domain
from megamoe_kernel.reference import Activation

PAGE = Path(__file__).parents[4] / "docs" / "kernel-contract.md"
PRO = MODELS["deepseek-v4-pro"]


def _buffer(activation: Activation = "nvfp4", **changes: Any) -> SymmBuffer:
    sizes: dict[str, Any] = {
        "num_experts": 4, "num_max_tokens_per_rank": 8, "num_topk": 2, "hidden": 256,
        "intermediate": 128, "activation": activation,
    }  # fmt: skip
    return get_symm_buffer_for_nvfp4_mega_moe(**{**sizes, **changes})


@pytest.mark.parametrize("activation", ["nvfp4", "bf16"])
def test_every_field_is_its_own_memory(activation: Activation) -> None:
    buffer = _buffer(activation)
    assert buffer.memory is not None
    assert buffer.memory.numel() == buffer.layout.nbytes
    assert buffer.peers == (buffer.memory.data_ptr(),)
    before = buffer.memory.clone()
    for number, (name, row) in enumerate(buffer.layout.fields.items(), start=1):
        field = buffer.field(name)
        assert field.nbytes == row.nbytes
        assert field.shape[0] == row.rows
        if row.nbytes:
            assert field.data_ptr() == buffer.address(name)
            assert buffer.address(name) - buffer.peers[0] == row.offset
            field.view(torch.uint8).fill_(number)
    for number, name in enumerate(buffer.layout.fields, start=1):
        assert bool((buffer.field(name).view(torch.uint8) == number).all())
    gaps = (buffer.memory == before) & (buffer.memory == 0)
    used = sum(row.nbytes for row in buffer.layout.fields.values())
    assert int(gaps.sum()) == buffer.layout.nbytes - used


def test_a_destroyed_buffer_says_so() -> None:
    buffer = _buffer()
    kept = buffer.x
    buffer.destroy()
    buffer.destroy()
    assert kept.sum() == 0  # memory that somebody still holds is not gone
    for use in (
        lambda: buffer.x,
        lambda: buffer.field("slots"),
        lambda: buffer.address("x"),
        lambda: prepare_inputs(torch.zeros(1, 256), buffer),
    ):
        with pytest.raises(BackendError, match="destroyed; allocate another"):
            use()
    assert buffer.peers == ()


@pytest.mark.parametrize("activation", ["nvfp4", "bf16"])
def test_a_cleared_buffer_is_as_new(activation: Activation) -> None:
    buffer, new = _buffer(activation), _buffer(activation)
    assert buffer.memory is not None
    assert new.memory is not None
    buffer.memory.fill_(0xA5)
    assert buffer.failure() is not None
    buffer.clear()
    assert buffer.failure() is None
    assert torch.equal(buffer.memory, new.memory)
    buffer.destroy()
    with pytest.raises(BackendError, match="destroyed; allocate another"):
        buffer.clear()


def test_no_rank_clears_before_all_rest_or_goes_on_before_all_are_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    buffer = _buffer()
    buffer.group = object()  # type: ignore[assignment]
    monkeypatch.setattr(
        "megamoe_kernel.buffer.meet", lambda group: seen.append(int(buffer.x.sum()))
    )
    buffer.x.fill_(1)
    written = int(buffer.x.sum())
    buffer.clear()
    assert seen == [written, 0]


@pytest.mark.parametrize("name", ["nope", "", None, ["x"], 0], ids=str)
def test_fields_that_the_table_lacks(name: Any) -> None:
    buffer = _buffer()
    for use in (buffer.field, buffer.address):
        with pytest.raises(
            LayoutError, match=r"has no field .*, expected one of: barrier, x, x_sf"
        ):
            use(name)


def test_a_buffer_is_used_again_and_again() -> None:
    generator = torch.Generator().manual_seed(0)
    buffer = _buffer()
    for tokens in (8, 3, 0, 5):
        x = torch.randn(tokens, 256, generator=generator)
        prepare_inputs(x, buffer)
        assert torch.equal(buffer.x[:tokens], quantize_tokens(x).codes)
    for _ in range(20):
        _buffer().destroy()


def test_the_ring_holds_all_or_a_limit() -> None:
    few = layer_layout(PRO, "nvfp4", 8, 8).fields["ring_x"]
    many = layer_layout(PRO, "nvfp4", 8, 8192).fields["ring_x"]
    assert few.rows == 8 * 8 * 6 + 48 * 256 + 128  # rounded up to whole tiles of 256
    assert many.rows == 32768
    assert _buffer(ring_rows=512).layout.fields["ring_x"].rows == 512
    for wrong in (0, 100, -256, 256, 2**21, 2**40):
        with pytest.raises(ShapeError, match=f"ring_rows is {wrong}, expected a multiple of 256"):
            _buffer(ring_rows=wrong)


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(ShapeError, match="num_experts is 384, .* 72 ranks; .* 432 would fit"):
        layer_layout(PRO, "nvfp4", 72, 256)
    layer_layout(MoEShape(432, 6, 7168, 3072), "nvfp4", 72, 256)


HERE = Place("host a", "gpu 0", None)


def test_one_host_is_one_domain() -> None:
    check_one_domain([replace(HERE, device=f"gpu {n}") for n in range(8)])


def test_one_fabric_is_one_domain() -> None:
    check_one_domain([Place(f"host {n // 4}", f"gpu {n}", "cluster-1") for n in range(72)])


@pytest.mark.parametrize("fabrics", [(None, None), ("a-1", "a-2"), ("a-1", None)], ids=str)
def test_two_hosts_without_a_common_fabric_are_refused(
    fabrics: tuple[str | None, str | None],
) -> None:
    places = [Place(f"host {n}", f"gpu {n}", fabric) for n, fabric in enumerate(fabrics)]
    with pytest.raises(BackendError, match="rank 1 is outside the NVLink domain of rank 0.*nodes"):
        check_one_domain(places)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    with pytest.raises(BackendError, match="ranks 0 and 1 are on the same GPU"):
        check_one_domain([HERE, HERE])


def test_the_table_of_sizes_in_the_contract() -> None:
    if not PAGE.exists():
        pytest.skip("needs the repository: reads docs/kernel-contract.md")
    head, *rows = [size_heads(), *size_rows(PRO)]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    assert "\n".join(lines) in PAGE.read_text()
