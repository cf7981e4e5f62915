"""Blocks that the exact cast cannot hold: what the manifest admits is recomputed, not believed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_v4_patches.validate import Validation, examine

W3 = "layers.1.ffn.experts.3.w3"
#: E2M1 codes of half the value, ties to even: 18 octaves below the top is one below the window.
HALVED = (0, 0, 1, 2, 2, 3, 4, 5)
FLOOR = 0x01  # 2**-9 in E4M3


def rounded(source: Any, made: Any, blocks: int) -> None:
    """Puts the first blocks 18 octaves below the pair's top, in the source and as exported."""
    top = int(math.log2(float(made.tensors[f"{W3}.weight_scale_2"]))) + 127 + 8
    source.raw(f"{W3}.scale")[:blocks] = top - 18
    made.raw(f"{W3}.weight_scale")[: 2 * blocks] = FLOOR
    codes = made.raw(f"{W3}.weight")[: 16 * blocks]
    table = torch.tensor([*HALVED, *(8 | code for code in HALVED)], dtype=torch.uint8)
    codes.copy_(table[(codes & 15).int()] | (table[(codes >> 4).int()] << 4))


def nothing(made: Any) -> None:
    pass


def code_elsewhere(made: Any) -> None:
    """A code of the block after the first ten."""
    made.raw(f"{W3}.weight")[160] ^= 1


def code_inside(made: Any) -> None:
    """A code of a block that was rounded: it must still be the nearest."""
    made.raw(f"{W3}.weight")[3] ^= 2


def larger_scale_2(made: Any) -> None:
    made.tensors[f"{W3}.weight_scale_2"] = made.tensors[f"{W3}.weight_scale_2"] * 1.5


@pytest.fixture
def export(healthy, write, tmp_path) -> Callable[..., Validation]:
    def run(blocks: int, noted: int, change: Callable[[Any], None]) -> Validation:
        source, made = (
            replace(healthy[kind], tensors=dict(healthy[kind].tensors))
            for kind in ("official", "experts")
        )
        rounded(source, made, blocks)
        change(made)
        folder: Path = write(made, tmp_path / "made")
        notes = {f"{W3}.weight": {"requantized_blocks": noted}}
        (folder / "export_manifest.json").write_text(json.dumps({"files": {}, "notes": notes}))
        return examine(folder, against=write(source, tmp_path / "source"), sample="all")

    return run


@pytest.mark.parametrize("blocks", [1, 4])
def test_an_honest_note(export, blocks: int):
    made = export(blocks, blocks, nothing)
    assert made.findings == ()
    assert f"{blocks} blocks of 1 experts could not be cast exactly" in made.notes
    row = next(row for row in made.rows if row.role == "routed_expert")
    assert row.sqnr_min is not None
    assert math.isfinite(row.sqnr_min)
    assert row.sqnr_median == math.inf


@pytest.mark.parametrize(
    ("blocks", "noted", "change", "found"),
    [
        (2, 1, nothing, "2 rounded block(s) of 32 where the manifest says 1"),
        (1, 4, nothing, "1 rounded block(s) of 32 where the manifest says 4"),
        (0, 1, nothing, "0 rounded block(s) of 32 where the manifest says 1"),
        (1, 4, code_elsewhere, "1 block(s) of 32 other than the cast"),
        (4, 4, code_elsewhere, "1 block(s) of 32 other than the cast"),
        (4, 4, code_inside, "1 block(s) of 32 other than the cast"),
    ],
)
def test_a_note_excuses_nothing_else(export, only, blocks, noted, change, found):
    made = export(blocks, noted, change)
    assert only(made)[:2] == ("not-exact", f"{W3}.weight")
    assert made.findings[0].found.startswith(found)


def test_a_note_beside_another_global_scale(export):
    made = export(1, 1, larger_scale_2)
    assert f"{W3}.weight" in {finding.tensor for finding in made.findings}
