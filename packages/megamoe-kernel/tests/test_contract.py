"""The written contract says what the code does: its example runs, its lists are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import megamoe_kernel
from megamoe_kernel import errors, layout_sm90, reference

PAGE = Path(__file__).parents[3] / "docs" / "kernel-contract.md"
pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="needs the repository: reads docs/kernel-contract.md"
)


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text()


def test_the_example_runs(text: str) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, torch.Tensor] = {}
    exec(compile(block, "kernel-contract.md", "exec"), names)
    assert 0.05 < float(names["y"].float().std()) < 1


def test_every_public_name_is_explained(text: str) -> None:
    assert not [name for name in megamoe_kernel.__all__ if f"`{name}" not in text]
    raised = [name for name in vars(errors) if name.endswith("Error") and name != "MegaMoEError"]
    assert len(raised) == 11
    assert not [name for name in raised if f"\n| `{name}` |" not in text]


def test_every_rounding_point_is_in_the_table(text: str) -> None:
    table = re.search(
        r"=+  =+\npoint .*\n=+  =+\n(.*?)\n=+  =+", reference.__doc__ or "", re.DOTALL
    )
    assert table is not None
    points = re.findall(r"^([A-Z][A-Z0-9_]+) ", table[1], re.MULTILINE)
    assert len(points) == 10
    assert re.findall(r"^\| `([A-Z0-9_]+)` \|", text, re.MULTILINE) == points


def test_the_numbers_of_the_register_order(text: str) -> None:
    assert f"`[E, N/64, K/128, {layout_sm90.TILE_BYTES}]`" in text
    first = layout_sm90._Z_FIRST
    assert (
        f"w0 & 0x{first:08X} | (w1 << {layout_sm90._Z_SHIFT}) & 0x{~first & 0xFFFFFFFF:08X}" in text
    )
    assert layout_sm90._ROTATED[0] == 0
    for words, places in (("w", layout_sm90._ROTATED[1:]), ("z", layout_sm90._Z_ROTATED)):
        assert re.findall(rf"rotl\({words}, (\d+)\)", text) == [str(n) for n in places]
