"""What the device headers promise as texts: their order, and the numbers that Python repeats."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megamoe_kernel.failure import WAITS

INCLUDE = Path(__file__).parents[2] / "src" / "megamoe_kernel" / "include"
#: Folders on one level do not include each other.
LEVELS = (("common",), ("layout",), ("scheduler",), ("ptx", "comm", "mma"), ("stages",), ("impl",))
LEVEL = {folder: level for level, folders in enumerate(LEVELS) for folder in folders}
HEADERS = sorted(path for path in (INCLUDE / "megamoe").rglob("*") if path.is_file())
STANDARD = {"cstdint", "cstddef"}  # what include/nvrtc has


def included(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.M)


def wrong_includes(folder: str, names: list[str]) -> list[str]:
    """Includes that a header of this folder must not have."""
    wrong = []
    for name in names:
        parts = name.split("/")
        if name in STANDARD or (parts[0] == "megamoe" and parts[1] == folder):
            continue
        if parts[0] != "megamoe" or LEVEL[parts[1]] >= LEVEL[folder]:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_a_folder_includes_only_those_before_it(path: Path) -> None:
    folder = path.relative_to(INCLUDE / "megamoe").parts[0]
    assert wrong_includes(folder, included(path)) == []
    assert "#pragma once" in path.read_text()


def test_a_wrong_include_is_noticed() -> None:
    assert wrong_includes("layout", ["megamoe/scheduler/pool.hpp"])
    assert wrong_includes("comm", ["megamoe/ptx/tma.cuh"])
    assert wrong_includes("common", ["vector"])
    assert not wrong_includes("stages", ["megamoe/stages/fetch.hpp", "megamoe/comm/x.hpp"])


def test_neutral_headers_have_no_device_code() -> None:
    # .cuh is for GPUs alone; what the host compiles is .hpp and knows no thread index.
    for path in HEADERS:
        if path.suffix == ".hpp":
            assert not re.search(r"\basm\b|threadIdx|blockIdx|__syncthreads", path.read_text()), (
                path
            )


def test_failure_records_are_read_as_they_are_written() -> None:
    text = (INCLUDE / "megamoe" / "common" / "failure.hpp").read_text()
    (enum,) = re.findall(r"enum class Wait .*?\};", text, re.S)
    waits = dict(re.findall(r"^  k(\w+) = (\d+),", enum, re.M))
    assert [int(number) for number in waits.values()] == list(range(len(WAITS)))
    stages = dict(zip(waits, (stage for stage, _ in WAITS), strict=True))
    assert stages == {
        "Nothing": "none",
        "GridBarrier": "route",
        "DispatchBarrier": "dispatch",
        "RingSlot": "fetch",
        "Tokens": "L1",
        "Intermediate": "L2",
        "CombineBarrier": "combine",
        "Pipeline": "mainloop",
    }
