"""The split between calibration and measurement is the one that the tiny model was trained with."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from modelopt_v4_patches.errors import DSV4Error
from modelopt_v4_patches.quality import text

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def training_rule() -> ModuleType:
    spec = importlib.util.spec_from_file_location("data", ROOT / "tools/tiny_dsv4/data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("side", ["validation", "evaluation"])
def test_held_out_text_is_what_training_held_out(
    training_rule: ModuleType, side: text.Side
) -> None:
    theirs = training_rule.excerpts(training_rule.standard_library(), side)
    ours = text.held_out_excerpts(side)
    assert list(ours.items()) == list(theirs.items())
    assert len(ours) >= 8  # 32,000 tokens in 8,192-byte excerpts, and some to spare


def test_the_sides_share_no_module(training_rule: ModuleType) -> None:
    modules = training_rule.standard_library()
    sides: dict[str, set[str]] = {"training": set(), "validation": set(), "evaluation": set()}
    for name in modules:
        assert training_rule.side_of(name) == text.side_of(name)
        sides[text.side_of(name)].add(name)
    for side in ("validation", "evaluation"):
        names = {name.partition("+")[0] for name in training_rule.excerpts(modules, side)}
        assert names <= sides[side]
        # one half each of one in 16
        assert len(sides[side]) / len(modules) == pytest.approx(1 / 32, rel=0.5)
    stream = training_rule.training_stream(modules)
    expected = sum(len(modules[name]) + 2 for name in sides["training"])
    assert stream.numel() == expected


def test_calibration_text_was_trained_on(training_rule: ModuleType) -> None:
    held_out = b"".join(
        source
        for name, source in training_rule.standard_library().items()
        if training_rule.side_of(name) != "training"
    )
    pieces = text.calibration_texts(64, 400)
    assert {len(piece) for piece in pieces} == {400}
    assert len(set(pieces)) == 64
    assert not [piece for piece in pieces if piece.encode() in held_out]


def test_windows_are_the_excerpts_cut_evenly() -> None:
    excerpts = list(text.held_out_excerpts().values())
    windows = text.held_out_windows(5, 4096)
    assert windows.shape == (5, 4096)
    assert windows.dtype == np.int64
    assert bytes(windows[2].tolist()) == excerpts[1][:4096]
    assert bytes(windows[3].tolist()) == excerpts[1][4096:]


def test_the_first_windows_are_of_different_modules() -> None:
    names = list(text.held_out_excerpts())
    modules = [name.partition("+")[0] for name in names]
    first = len(set(modules))
    assert "+" not in "".join(names[:first])
    assert names[first] == f"{modules[first]}+{text.EXCERPT_BYTES}"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("count", "length", "message"),
    [
        (1, 4095, "4095 bytes do not divide"),
        (10**6, 4096, "1000000 windows were asked for; there are"),
    ],
)
def test_what_is_not_there_is_refused(count: int, length: int, message: str) -> None:
    with pytest.raises(DSV4Error, match=message):
        text.held_out_windows(count, length)


def test_too_many_calibration_texts_are_refused() -> None:
    with pytest.raises(DSV4Error, match="1000000 texts"):
        text.calibration_texts(10**6)
