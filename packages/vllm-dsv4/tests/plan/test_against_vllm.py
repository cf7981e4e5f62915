"""The KV cache, stages and defaults against vLLM's own functions, in a process of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvfp4_codec.schemas.deepseek_v4 import ModelConfig
from vllm_dsv4.gpus import GIB, Gpus
from vllm_dsv4.plan import Deployment, Limits, released
from vllm_dsv4.plan.kv_cache import config_layers, kv_cache

CONTEXTS = (100, 4096, 100_001, 1_048_576)
IN_FLIGHT = (4096, 32768)


def tiny() -> ModelConfig:
    path = Path(__file__).parents[4] / "tests" / "assets" / "tiny-dsv4" / "config.json"
    return ModelConfig.from_file(path)


MODELS = {
    "pro": released("pro").schema.config,
    "flash": released("flash").schema.config,
    "tiny": tiny(),
}
#: name -> config, with MTP, pipeline stages
CASES = {
    "pro": ("pro", False, 1),
    "pro-mtp": ("pro", True, 1),
    "pro-mtp-2": ("pro", True, 2),
    "flash": ("flash", False, 1),
    "flash-mtp-3": ("flash", True, 3),
    "tiny": ("tiny", True, 1),
}


def asked(name: str, in_flight: int) -> dict[str, Any]:
    model, mtp, stages = CASES[name]
    config = MODELS[model]
    blocks = [block for block in config.blocks if mtp or block.kind == "layers"]
    deployment = Deployment(pipeline_parallel=stages)
    spans = [list(deployment.layers(config, stage)) for stage in range(stages)]
    spans[-1][1] = len(blocks)
    return {
        "ratios": [block.ratio for block in blocks],
        "head_dim": config.dimensions["head_dim"],
        "index_dim": config.dimensions["index_dim"],
        "window": 128,
        "stages": spans,
        "contexts": CONTEXTS,
        "in_flight": in_flight,
    }


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    cases = [asked(name, tokens) for name in CASES for tokens in IN_FLIGHT]
    program = Path(__file__).with_name("ask_vllm.py")
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    keys = [(name, tokens) for name in CASES for tokens in IN_FLIGHT]
    found["cases"] = dict(zip(keys, found["cases"], strict=True))
    return found


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_vllms(name: str, answers: dict[str, Any]) -> None:
    model, mtp, stages = CASES[name]
    config, deployment = MODELS[model], Deployment(pipeline_parallel=stages)
    caches = [
        kv_cache(config, 128, mtp=mtp, here=deployment.layers(config, stage))
        for stage in range(stages)
    ]
    for tokens in IN_FLIGHT:
        theirs = answers["cases"][name, tokens]
        assert [cache.block_bytes for cache in caches] == theirs["block_bytes"]
        for cache in caches:
            assert len(cache.groups) == theirs["groups"]
            ours = {str(context): cache.blocks(context, tokens) for context in CONTEXTS}
            assert ours == theirs["blocks"]


def test_stages_are_vllms(answers: dict[str, Any]) -> None:
    config = MODELS["pro"]
    assert config_layers(config) == 61
    for count, spans in answers["stages"].items():
        deployment = Deployment(pipeline_parallel=int(count))
        ours = [list(deployment.layers(config, stage)) for stage in range(int(count))]
        assert ours == spans


def test_defaults_are_vllms(answers: dict[str, Any]) -> None:
    limits = Limits(1 << 20)
    assert limits.gpu_memory_utilization == answers["gpu_memory_utilization"]
    for gib, steps in answers["steps"].items():
        gpus = Gpus("X", "hopper", 1, int(gib) * GIB)
        assert [limits.step_tokens(gpus), limits.step_requests(gpus)] == steps
