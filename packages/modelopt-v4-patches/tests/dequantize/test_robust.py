"""Killed at random moments it continues to the same bytes; memory stays within its bound."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelopt_v4_patches import dequantize_checkpoint
from nvfp4_codec.checkpoint.header import TensorSpec, build_header
from nvfp4_codec.checkpoint.job import PLAN_NAME
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Schema


def tree(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize(
    "kills", [pytest.param(8, id="few"), pytest.param(80, id="many", marks=pytest.mark.full)]
)
def test_killed_at_random_it_resumes_to_the_same_bytes(
    small: Path, tmp_path: Path, kills: int
) -> None:
    driver = Path(__file__).with_name("kill_driver.py")
    words = [sys.executable, str(driver), str(small), str(tmp_path), str(kills), "3"]
    subprocess.run(words, check=True, env=environment())
    expected = tree(tmp_path / "clean")
    assert len(expected) == 7  # four shards, index, config, tokenizer
    assert tree(tmp_path / "timed") == expected
    interrupted = 0
    for i in range(kills):
        output = tmp_path / f"killed-{i}"
        interrupted += (output / PLAN_NAME).exists()
        dequantize_checkpoint(small, output, resume=True)
        assert tree(output) == expected
    assert interrupted  # how many depends on what else the machine does


MEASURE = """
import re, sys
from pathlib import Path
import torch
import nvfp4_codec.checkpoint.values
import modelopt_v4_patches.dequantize as subject

def kib(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
size = kib("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
subject.dequantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
print((kib("VmHWM") - size) * 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("large", ["fp8_block", pytest.param("mxfp4", marks=pytest.mark.full)])
def test_memory_is_bounded_by_the_largest_tensor(
    large: str, small_config: dict[str, Any], tmp_path: Path
) -> None:
    """A matrix of 256 MiB in BF16; float32 on the way, or two matrices at a time, is too much."""
    sizes: dict[str, Any] = {
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 1,
    }
    sizes |= {"compress_ratios": [0], "num_nextn_predict_layers": 0, "num_hash_layers": 0}
    if large == "fp8_block":  # wq_b
        sizes |= {"num_attention_heads": 128, "head_dim": 256, "q_lora_rank": 4096, "o_groups": 64}
    else:  # w1, w2, w3
        sizes |= {"hidden_size": 8192, "moe_intermediate_size": 16384, "n_shared_experts": 1}
    config = {**small_config, **sizes}
    specs = [TensorSpec(*spec) for spec in Schema(ModelConfig.from_dict(config)).tensors()]
    source = tmp_path / "in"
    source.mkdir()
    layout = build_header(specs, {"format": "pt"})
    with (source / "model.safetensors").open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)  # zeros that take no disk
    (source / "config.json").write_text(json.dumps(config))
    words = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out")]
    done = subprocess.run(words, check=True, env=environment(), capture_output=True, text=True)
    plain = Schema(ModelConfig.from_dict(config)).tensors("plain")
    largest = max(TensorSpec(*spec).nbytes for spec in plain)
    assert largest == 256 << 20
    used = int(done.stdout)
    assert largest < used <= 2 * largest + (256 << 20)
