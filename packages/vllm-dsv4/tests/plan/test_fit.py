"""What fits, and the command that says so."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_dsv4.cli.plan import register
from vllm_dsv4.errors import OptionError, PlanError
from vllm_dsv4.gpus import parse_gpus
from vllm_dsv4.moe_backend import MoEShape, Verdict
from vllm_dsv4.options import Options
from vllm_dsv4.plan import Deployment, Limits, Plan, choose_deployment, plan, released


def planned(model: str, gpus: str, nodes: int = 1, **limits: Any) -> Plan:
    stored, found = released(model), parse_gpus(gpus, nodes)
    deployment = choose_deployment(found, stored)
    return plan(stored, found, deployment, Limits(limits.pop("context", 1 << 20), **limits))


def test_what_fits_for_pro() -> None:
    b200, h200 = planned("pro", "B200:8"), planned("pro", "H200:8")
    assert b200.fits
    assert b200.longest == 1 << 20
    assert h200.fits
    assert 100_000 < h200.longest < 1 << 20  # the weights leave 12 GB
    assert not planned("pro", "H200:4").fits
    assert not planned("pro", "H100:8").fits
    two = planned("pro", "H200:8", nodes=2)
    assert two.longest == 1 << 20
    assert sum(two.weights.values()) < 0.52 * sum(h200.weights.values())
    assert planned("flash", "H200:2").fits


def test_smaller_steps_and_mtp() -> None:
    usual = planned("pro", "H200:8")
    small = planned("pro", "H200:8", max_num_batched_tokens=2048)
    mtp = planned("pro", "H200:8", mtp=True)
    assert small.longest > usual.longest > mtp.longest
    assert sum(mtp.weights.values()) - sum(usual.weights.values()) == mtp.weights["MTP"]


def test_memory_adds_up() -> None:
    found = planned("pro", "H200:8")
    assert found.usable == int(found.gpus.memory * 0.92)
    spent = sum(found.weights.values()) + sum(found.buffers.values())
    assert spent + found.kv_memory == found.usable
    need = found.cache.request_bytes(found.longest, found.in_flight)
    assert need <= found.kv_memory < need + found.cache.block_bytes


def test_data_parallel_ranks_serve_more_requests() -> None:
    stored, gpus = released("flash"), parse_gpus("H200:8")
    limits = Limits(1 << 17)
    tp = plan(stored, gpus, choose_deployment(gpus, stored), limits)
    dp = plan(stored, gpus, choose_deployment(gpus, stored, data_parallel=8), limits)
    assert dp.weights["routed experts"] == tp.weights["routed experts"]
    assert dp.weights["attention"] > tp.weights["attention"]
    assert dp.concurrent > 6 * tp.concurrent


def test_what_cannot_be_is_refused() -> None:
    stored, gpus = released("pro"), parse_gpus("H200:8")
    with pytest.raises(PlanError, match="parallel sizes of 16 GPUs in all, on 8 x H200"):
        plan(stored, gpus, Deployment(16), Limits(4096))
    fused = Deployment(8, expert_parallel=True, mega_moe=True)
    with pytest.raises(PlanError, match="runs on Blackwell of the data center only, not on H200"):
        plan(stored, gpus, fused, Limits(4096))
    assert plan(stored, gpus, fused, Limits(4096), Options(moe_kernel="some")).fits
    with pytest.raises(OptionError, match="asks for NVFP4"):
        plan(
            released("pro", "experts"), gpus, Deployment(8), Limits(1), Options(attn_dtype="nvfp4")
        )


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(["plan", *map(str, words)])
    code: int = arguments.run(arguments)
    return code


def test_the_usual_places(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--model", "pro") == 0
    out = capsys.readouterr().out
    assert "DeepSeek-V4-Pro, full: 905.7 GB of weights, 891.0 without MTP" in out
    # 0.56 bytes of the parameters, counted by hand from the model's dimensions.
    assert "1,573.0 billion parameters, 881 GB (1,598.8 with MTP, 895 GB) at 0.56 bytes" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("8 x B200 yes TP 8, EP, MegaMoE 116.0") for line in lines)
    assert any(line.startswith("8 x H200 partly TP 8, EP 114.0") for line in lines)
    assert any(line.startswith("2 nodes of 8 x H200 yes TP 8, PP 2, EP") for line in lines)


def test_a_small_model_is_counted_in_millions(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(checkpoint("full"), "--gpus", "H200:1") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "12.0 million parameters, 7 MB (14.6 with MTP, 8 MB) at 0.56 bytes each" in out


def test_one_place_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "flash", "--stored", "experts", "--gpus", "H200:2", "--tp", 1, "--dp", 2)
    assert call(*words) == 0
    out = capsys.readouterr().out
    assert "TP 1, DP 2, EP" in " ".join(out.split())
    assert "compressed 4:1" in out
    assert "146.25" in out
    assert "allowance" in out


def test_what_the_words_of_the_table_mean(capsys: pytest.CaptureFixture[str]) -> None:
    """8 x 79.1 GiB, 92 % of them: 78.1 GB each, and a 110 GB part of the experts alone."""
    assert call("--model", "pro", "--gpus", "H100:8") == 1
    out = capsys.readouterr().out
    assert "8 x H100 no" in " ".join(out.split())
    (inline,) = re.findall(r"EP +[0-9.]+ +[0-9.]+ +short by ([0-9.]+)", out)
    assert 110 - 78.1 < float(inline) < 60
    assert f"does not fit, short by {inline}" in out
    assert "-" not in re.sub("DeepSeek-V4-Pro|--max-model-len", "", out)
    assert "partly, if only a shorter context" in out


def test_experts_that_are_not_fp4(
    checkpoint: Callable[..., Path], checkpoints: ModuleType, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = shutil.copytree(checkpoint("full"), tmp_path / "copy")
    checkpoints.change(folder, experts_to_bf16)
    assert call(folder, "--gpus", "B200:2") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "TP 2, EP " in out
    assert "MegaMoE" not in out
    assert "Routed experts are not FP4: vLLM runs them in its unquantized fused MoE (BF16)" in out
    assert call(checkpoint("full"), "--gpus", "B200:2") == 0
    out = capsys.readouterr().out
    assert "TP 2, EP, MegaMoE" in out
    assert "not FP4" not in out


def experts_to_bf16(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
        module = name.removesuffix(".weight")
        rows, half = tensors[name].shape
        tensors[name] = torch.zeros(rows, 2 * half, dtype=torch.bfloat16)
        for part in ("weight_scale", "weight_scale_2", "input_scale"):
            tensors.pop(f"{module}.{part}", None)


def test_json_and_the_exit_code_of_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--model", "pro", "--gpus", "H100:8", "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    assert found["fits"] is False
    assert found["longest_context"] == 0
    assert found["kv_memory"] < 0
    assert found["checkpoint_bytes"] == 905_712_532_096
    assert found["kv_bytes_per_token_and_layer"]["4"] == {"entries": 146.25, "indexer": 33.75}


def test_a_folder(checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint("full", "hf")
    assert call(folder, "--gpus", "B300:2:268", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    assert found["tensor_parallel"] == 2
    assert found["gpus"]["memory"] == 268 << 30
    assert found["longest_context"] == 8192  # the tiny model's own


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a checkpoint folder or --model"),
        (("x", "--model", "pro"), "give a checkpoint folder or --model"),
        (("--model", "pro", "--tp", 4), "add --gpus"),
        (("--model", "pro", "--nodes", 2), "add --gpus"),
        (("x", "--stored", "full"), "--stored is for --model"),
    ],
)
def test_bad_input(
    words: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words) == 2
    assert message in capsys.readouterr().err


def test_a_size_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("--model", "pro", "--gpus", "H200:8", "--tp", "two")
    assert "'two' is no whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("128k", 128_000), ("128K", 131_072), ("25.6k", 25_600), ("131072", 131_072),
     ("auto", 1 << 20)],
)  # fmt: skip
def test_a_context_as_vllm_reads_it(
    text: str, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--model", "pro", "--gpus", "B200:8", "--max-model-len", text, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    assert found["max_model_len"] == tokens


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.5K", "'1.5K': only k, m, g and t, the powers of 1000, take a fraction"),
        ("128kB", "'128kB' is no whole number; give one such as 131072, 128K or 131.072k"),
        ("1e5", "'1e5' is no whole number"),
        ("-5", "'-5' is no whole number"),
        ("0k", "0 is not positive"),
    ],
)
def test_an_odd_context_is_refused(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call("--model", "pro", f"--max-model-len={text}")
    assert f"argument --max-model-len: {message}" in " ".join(capsys.readouterr().err.split())


def test_missing_tensors_are_told(
    checkpoint: Callable[..., Path], checkpoints: ModuleType, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = shutil.copytree(checkpoint("full"), tmp_path / "copy")
    checkpoints.change(folder, lambda tensors: tensors.pop("layers.2.attn.wkv.weight"))
    assert call(folder, "--gpus", "H200:1") == 0
    assert "1 tensors are missing and not counted, such as layers.2.attn.wkv" in caplog.text


def test_absurd_counts_end_at_once() -> None:
    stored, many = released("pro"), parse_gpus("H200:99999999999")
    assert choose_deployment(many, stored).tensor_parallel == 16
    far = parse_gpus("H200:8", 10**12)
    with pytest.raises(PlanError, match=r"61 layers cannot be divided over 10{12} pipeline"):
        plan(stored, far, choose_deployment(far, stored), Limits(4096))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("8xB200", "KIND:COUNT"),
        ("B200:0", "KIND:COUNT"),
        ("B300:8", "memory of B300 is not known"),
        ("A100:8:79", "neither Hopper"),
        ("H200:8:0", "gives each GPU no memory"),
    ],
)
def test_gpus_given_wrongly(given: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_gpus(given)


class Hopper:
    """A backend that runs there alone."""

    def __init__(self, shape: MoEShape, process_group: object) -> None:
        assert process_group is None
        assert (shape.ep_size, shape.num_local_experts, shape.top_k) == (8, 48, 6)

    def supports(self, capability: tuple[int, int], shape: MoEShape) -> Verdict:
        return Verdict(capability == (9, 0), "it takes 9.0")


def test_a_moe_kernel_is_asked_as_serve_asks_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(OptionError, match="moe_kernel is 'nope'; installed backends"):
        call("--model", "pro", "--gpus", "H200:8", "--moe-kernel", "nope")
    entry = SimpleNamespace(load=lambda: Hopper)
    monkeypatch.setattr("vllm_dsv4.moe_backend.backends", lambda: {"some": entry})
    with pytest.raises(OptionError, match=r"moe_kernel 'some' cannot be used here: it takes 9\.0"):
        call("--model", "pro", "--gpus", "B200:8", "--moe-kernel", "some")
    assert not capsys.readouterr().out
    assert call("--model", "pro", "--gpus", "H200:8", "--moe-kernel", "some") == 0
    assert "8 x H200" in capsys.readouterr().out
    assert not caplog.messages
    # Of the usual places, those where it runs.
    assert call("--model", "pro", "--moe-kernel", "some", "--json") == 0
    kinds = [each["gpus"]["kind"] for each in json.loads(capsys.readouterr().out)["plans"]]
    assert kinds == ["H200", "H200"]
    assert [message[:40] for message in caplog.messages] == [
        "8 x B200 are left out: moe_kernel 'some'", "2 nodes of 8 x B200 are left out: moe_ke",
    ]  # fmt: skip
