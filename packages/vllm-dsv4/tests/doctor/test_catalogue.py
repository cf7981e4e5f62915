"""The catalogue knows every code that the checks can give, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import nvfp4_codec
import vllm_dsv4
from nvfp4_codec.explain.hypotheses import HYPOTHESES
from vllm_dsv4.doctor.catalogue import CATALOGUE

CODEC, DOCTOR = Path(nvfp4_codec.__file__).parent, Path(vllm_dsv4.__file__).parent / "doctor"
_CODE = re.compile(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"')
_CHECKS = ("verify", "structure", "loose", "against")
#: In the same files, but no findings.
_OTHERS = {
    "model-structure", "fp8-block", "compressed-tensors", "nibble-order", "swizzled-scales",
    "missing-global-scale", "unit-scales", "scale-format", "utf-8",
}  # fmt: skip


def written() -> set[str]:
    """Every text in the checks' sources that looks like a code."""
    files = [
        *(CODEC / "checkpoint" / "deepseek_v4").glob("*.py"),
        *(CODEC / "checkpoint" / f"{name}.py" for name in _CHECKS),
        *(file for file in DOCTOR.glob("*.py") if file.name != "catalogue.py"),
    ]
    found = {code for file in files for code in _CODE.findall(file.read_text())}
    return (found | {"unfinished"} | {hypothesis.name for hypothesis in HYPOTHESES}) - _OTHERS


def test_every_code_is_in_the_catalogue():
    assert written() == set(CATALOGUE)


def test_what_the_plugin_handles_says_so():
    for code, row in CATALOGUE.items():
        assert ("plugin" in row.effect) == (row.handled in ("transform", "config")) or (
            code in ("missing-input-scale", "config-value")
        ), code
        assert row.effect.endswith("."), code
