"""A prepared checkpoint in vLLM as it comes, without the plugin: as the experts preset loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vllm_dsv4.prepare import prepare_checkpoint

from .conftest import Vllm
from .expected import check


@pytest.mark.parametrize("mtp", [False, True], ids=["model", "mtp"])
def test_vllm_loads_it_without_the_plugin(
    mtp: bool,
    vllm: Vllm,
    checkpoint: Callable[..., Path],
    checkpoints: ModuleType,
    oracle: ModuleType,
    tmp_path: Path,
) -> None:
    output = tmp_path / "prepared"
    prepare_checkpoint(checkpoint("all-nvfp4", "hf"), output)
    ours = vllm.load(output, without_plugin=True, mtp=mtp)
    theirs = vllm.load(checkpoint("experts"), without_plugin=True, mtp=mtp)
    assert ours.class_name == theirs.class_name
    assert not ours.class_name.startswith("DSV4")
    assert ours.loaded_counts == theirs.loaded_counts
    assert set(ours.loaded_counts.values()) == {1}
    assert ours.quant_methods == theirs.quant_methods
    check(ours, oracle, checkpoints.read(output))
