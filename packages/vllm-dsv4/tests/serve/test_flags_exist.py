"""Every flag that can be emitted, read by vLLM's own argument parser in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_dsv4 import serve
from vllm_dsv4.counts import read_count
from vllm_dsv4.gpus import parse_gpus
from vllm_dsv4.plan import released
from vllm_dsv4.serve import serve_command


def test_vllm_understands_every_flag(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    options = {"attn_dtype": "bf16", "verify_load": True}
    lines = [
        serve_command(checkpoint("full"), parse_gpus("B200:2"), options).argv,
        serve_command(checkpoint("full"), parse_gpus("H200:2", 2), {}).argv,
        serve_command(checkpoint("full"), parse_gpus("B200:2"), {}, ["-tp", "1"]).argv,
    ]
    with monkeypatch.context() as patched:
        patched.setattr(serve, "read_servable", lambda *_, **__: released("pro"))
        lines.append(serve_command(tmp_path, parse_gpus("H200:8:134")).argv)
    sizes = ("128k", "128K", "25.6k", "1.0009m", "2M", " 7 ", "0.1g", "3t", "1T", "12345")
    lines += [(*lines[0], "--max-model-len", size) for size in sizes]
    emitted = {word for line in lines for word in line if word.startswith("--")}
    source = Path(serve.__file__).read_text()
    known = [word for word in source.replace('"', " ").split() if f'yield "{word}"' in source]
    assert {f"--{word}" for word in known} <= emitted
    assert len(known) >= 9

    program = Path(__file__).with_name("parse_flags.py")
    done = subprocess.run(
        [sys.executable, str(program), json.dumps([line[2:] for line in lines])],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert serve.FORMAT in found["tool_parsers"]
    assert serve.FORMAT in found["reasoning_parsers"]
    assert serve.FORMAT in found["tokenizers"]
    fused, nodes, own, tight, *sized = found["parsed"]
    assert fused["moe_backend"] == "deep_gemm_mega_moe"
    assert fused["enable_expert_parallel"] is True
    assert fused["tensor_parallel_size"] == 2
    assert fused["additional_config"] == {"vllm_dsv4": options}
    assert fused["kv_cache_dtype"] == "fp8"
    assert fused["block_size"] == 256
    assert fused["max_model_len"] == -1
    assert (fused["tokenizer_mode"], fused["tool_call_parser"], fused["reasoning_parser"]) == (
        "deepseek_v4",
        "deepseek_v4",
        "deepseek_v4",
    )
    assert fused["enable_auto_tool_choice"] is True
    assert nodes["distributed_executor_backend"] == "ray"
    assert nodes["pipeline_parallel_size"] == 2
    assert own["tensor_parallel_size"] == 1
    assert tight["max_num_batched_tokens"] == 4096
    assert [line["max_model_len"] for line in sized] == [read_count(size) for size in sizes]
