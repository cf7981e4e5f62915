"""The trained tiny DeepSeek-V4, as it is and as NVFP4, and a few short windows of text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from modelopt_v4_patches.quality import text
from nvfp4_codec.cli import main as nvfp4

TINY = Path(__file__).parents[4] / "tests/assets/tiny-dsv4"


@pytest.fixture(scope="session")
def tiny() -> Path:
    return TINY


@pytest.fixture(scope="session")
def windows() -> NDArray[np.int64]:
    return text.held_out_windows(2, 1024)


@pytest.fixture(scope="session")
def experts_nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts cast to NVFP4, the rest official; every expert with an input_scale of its own."""
    folder = tmp_path_factory.mktemp("demo") / "experts"
    assert nvfp4(["convert", str(TINY), str(folder), "--to", "nvfp4"]) == 0
    tensors = load_file(folder / "model.safetensors")
    modules = sorted(n.removesuffix("_scale_2") for n in tensors if n.endswith("weight_scale_2"))
    for i, name in enumerate(modules):
        scale = torch.tensor((8 + i / len(modules)) / 2688)
        tensors[f"{name.removesuffix('weight')}input_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
