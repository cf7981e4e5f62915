"""The ``vllm serve`` line: what is chosen, what the user changes, what is refused."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from nvfp4_codec.checkpoint.reader import Checkpoint
from nvfp4_codec.errors import CheckpointError
from vllm_dsv4 import serve
from vllm_dsv4.errors import OptionError, PlanError
from vllm_dsv4.gpus import Gpus, parse_gpus
from vllm_dsv4.moe_backend import MoEShape, Verdict
from vllm_dsv4.plan import released
from vllm_dsv4.serve import Command, serve_command

Folder = Callable[..., Path]

CHAT = (
    "--tokenizer-mode deepseek_v4 --enable-auto-tool-choice --tool-call-parser deepseek_v4 "
    "--reasoning-parser deepseek_v4 --kv-cache-dtype fp8 --block-size 256"
)


def command(
    folder: Path,
    words: str = "",
    gpus: str = "H200:1",
    nodes: int = 1,
    options: Mapping[str, object] | None = None,
) -> Command:
    return serve_command(folder, parse_gpus(gpus, nodes), options, shlex.split(words))


def flags(found: Command) -> str:
    """Without ``vllm serve FOLDER``."""
    return shlex.join(found.argv[3:])


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        ("H200:1", 1, "--max-model-len auto"),
        ("H200:2", 1, "--tensor-parallel-size 2 --enable-expert-parallel --max-model-len auto"),
        (
            "B200:1", 1,
            "--enable-expert-parallel --moe-backend deep_gemm_mega_moe --max-model-len auto",
        ),
        (
            "B200:2", 1,
            "--tensor-parallel-size 2 --enable-expert-parallel --moe-backend deep_gemm_mega_moe "
            "--max-model-len auto",
        ),
        (
            "B200:2", 2,
            "--tensor-parallel-size 2 --pipeline-parallel-size 2 "
            "--distributed-executor-backend ray --enable-expert-parallel --max-model-len auto",
        ),
    ],
)  # fmt: skip
def test_by_gpus(checkpoint: Folder, gpus: str, nodes: int, expected: str) -> None:
    folder = checkpoint("full")
    found = command(folder, gpus=gpus, nodes=nodes)
    assert found.argv[:3] == ("vllm", "serve", str(folder))
    assert flags(found) == f"{CHAT} {expected}"


@pytest.mark.parametrize("scheme", ["official", "hf", "half_converted"])
@pytest.mark.parametrize("variant", ["full", "experts"])
def test_every_checkpoint_of_ours(checkpoint: Folder, variant: str, scheme: str) -> None:
    assert flags(command(checkpoint(variant, scheme))) == f"{CHAT} --max-model-len auto"


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        ("--tokenizer-mode auto", "--tokenizer-mode deepseek_v4"),
        ("--tool_call_parser x", "--tool-call-parser deepseek_v4"),
        ("--reasoning-parser=x", "--reasoning-parser deepseek_v4"),
        ("--kv-cache-dtype auto", "--kv-cache-dtype fp8"),
        ("--block-size 64", "--block-size 256"),
        ("-tp 1", "--tensor-parallel-size 2"),
        ("--no-enable-expert-parallel", "--enable-expert-parallel"),
        ("--max-model-len 4096", "--max-model-len auto"),
    ],
)
def test_the_user_wins(checkpoint: Folder, words: str, gone: str) -> None:
    usual = flags(command(checkpoint("full"), gpus="H200:2"))
    found = flags(command(checkpoint("full"), words, gpus="H200:2"))
    assert gone in usual
    assert gone not in found.removesuffix(words)
    assert found.endswith(words)


def test_tools_can_be_switched_off(checkpoint: Folder) -> None:
    found = flags(command(checkpoint("full"), "--no-enable-auto-tool-choice"))
    assert "--tool-call-parser" not in found


@pytest.mark.parametrize(
    "words",
    [
        "--moe-backend auto",
        "--kernel-config.moe_backend flashinfer_trtllm",
        """--kernel-config '{"moe_backend": "marlin"}'""",
    ],
)
def test_another_moe_backend_on_blackwell(checkpoint: Folder, words: str) -> None:
    found = command(checkpoint("full"), words, gpus="B200:2")
    assert "deep_gemm_mega_moe" not in found.line
    assert "--enable-expert-parallel" in found.argv
    assert not found.plan.deployment.mega_moe


def test_given_sizes_decide_the_rest(checkpoint: Folder) -> None:
    found = command(checkpoint("full"), "-tp 1 -dp 2", gpus="B200:2")
    assert "--enable-expert-parallel --moe-backend deep_gemm_mega_moe" in flags(found)
    one = command(checkpoint("full"), "-tp 1", gpus="H200:2")
    assert "--enable-expert-parallel" not in one.argv
    assert any("1 of 2 GPUs are used" in note for note in one.notes)


def test_options_travel_as_additional_config(checkpoint: Folder) -> None:
    given = """--port 1 --additional-config '{"other": 1, "vllm_dsv4": {"verify_load": true,
               "attn_dtype": "fp8"}}' --seed 2"""
    found = command(checkpoint("full"), given, options={"attn_dtype": "bf16"})
    place = found.argv.index("--additional-config")
    assert json.loads(found.argv[place + 1]) == {
        "other": 1,
        "vllm_dsv4": {"verify_load": True, "attn_dtype": "bf16"},
    }
    assert found.argv.count("--additional-config") == 1
    assert found.argv[-4:] == ("--port", "1", "--seed", "2")
    # Nothing of ours: the user's own is passed on as it stands.
    plain = command(checkpoint("full"), """--additional-config '{"other":1}'""")
    assert plain.argv[-2:] == ("--additional-config", '{"other":1}')


def test_a_moe_kernel_takes_vllms_fused_layer(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match="moe_kernel is 'some'; installed backends"):
        command(checkpoint("full"), options={"moe_kernel": "some"})
    install(monkeypatch, Some)
    for gpus in ("H200:1", "B200:2"):
        found = command(checkpoint("full"), gpus=gpus, options={"moe_kernel": "some"})
        assert "--enable-expert-parallel --moe-backend deep_gemm_mega_moe" in flags(found)


class Some:
    """A backend that takes everything, and keeps what it was asked."""

    asked: ClassVar[list[tuple[tuple[int, int], MoEShape]]] = []
    verdict = Verdict(True)

    def __init__(self, shape: MoEShape, process_group: object) -> None:
        assert process_group is None  # there are no ranks yet

    def supports(self, capability: tuple[int, int], shape: MoEShape) -> Verdict:
        self.asked.append((capability, shape))
        return self.verdict


class Never(Some):
    verdict = Verdict(False, "it runs nowhere")


def install(monkeypatch: pytest.MonkeyPatch, backend: type[Some]) -> None:
    entry = SimpleNamespace(load=lambda: backend)
    monkeypatch.setattr("vllm_dsv4.moe_backend.backends", lambda: {"some": entry})


@pytest.mark.parametrize(
    ("gpus", "capability"),
    [("H100:2", (9, 0)), ("GH200:2:95", (9, 0)), ("B200:2", (10, 0)), ("GB300:2:268", (10, 3))],
)
def test_a_moe_kernel_is_asked_what_vllm_will_ask_it(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, gpus: str, capability: tuple[int, int]
) -> None:
    install(monkeypatch, Some)
    folder = checkpoint("full")
    config = json.loads((folder / "config.json").read_text())
    Some.asked.clear()
    words = "--max-num-batched-tokens 512"
    command(folder, words, gpus=gpus, options={"moe_kernel": "some"})
    shape = MoEShape(
        num_experts=config["n_routed_experts"],
        num_local_experts=config["n_routed_experts"] // 2,
        first_expert=0,
        top_k=config["num_experts_per_tok"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["moe_intermediate_size"],
        max_num_tokens=512,
        swiglu_limit=config["swiglu_limit"],
        ep_size=2,
    )
    assert Some.asked == [(capability, shape)]


def test_a_moe_kernel_that_refuses_is_no_line(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own fused kernel is the other choice on Blackwell, and nowhere else."""
    install(monkeypatch, Never)
    refused = r"moe_kernel 'some' cannot be used here: it runs nowhere\. Leave --moe-kernel away"
    for gpus, rest in (("B200:1", " and use --moe-backend deep_gemm_mega_moe."), ("H200:1", ".")):
        with pytest.raises(OptionError, match=refused) as caught:
            command(checkpoint("full"), gpus=gpus, options={"moe_kernel": "some"})
        assert str(caught.value).endswith(f"away{rest}")


def test_megamoe_kernel_is_refused_on_blackwell(checkpoint: Folder) -> None:
    """Its backend in vLLM has Hopper's kernel only; the line was printed all the same."""
    pytest.importorskip("megamoe_kernel")
    options = {"moe_kernel": "megamoe"}
    with pytest.raises(OptionError, match=r"runs on compute capability 9\.0 .*, not on 10\.0\."):
        command(checkpoint("full"), gpus="B200:1", options=options)
    assert command(checkpoint("full"), gpus="H200:1", options=options).argv


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ("", {"attn_dtype": "int8"}, "attn_dtype is 'int8'"),
        ("", {"indexer_dtype": "nvfp4", "other": 1}, "other: no such option"),
        ("""--additional-config '{"vllm_dsv4": {"no": 1}}'""", {}, "no: no such option"),
        ("""--additional-config '{"vllm_dsv4": 1}'""", {"verify_load": True}, "is no object"),
        ("--additional-config.x 1", {"verify_load": True}, "given in parts"),
        ("--additional-config {", {}, "no JSON"),
        ("--additional-config.vllm_dsv4.attn_dtype int4", {}, "attn_dtype is 'int4'"),
        ("--gpu-memory-utilization nan", {}, "more than 0 and at most 1"),
        ("--tensor-parallel-size 0", {}, "at least 1 is needed"),
    ],
)
def test_wrong_options(
    checkpoint: Folder, words: str, options: Mapping[str, object], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        command(checkpoint("full"), words, options=options)


def test_speculation_needs_mtp_blocks(checkpoint: Folder) -> None:
    words = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
    with pytest.raises(OptionError, match="the checkpoint has no MTP blocks"):
        command(checkpoint("no-mtp"), words)
    assert command(checkpoint("no-mtp")).argv
    assert "MTP" in command(checkpoint("full"), words).plan.weights
    assert "MTP" not in command(checkpoint("full")).plan.weights
    with pytest.raises(OptionError, match="no MTP blocks"):
        command(checkpoint("no-mtp"), "--speculative-config.method mtp")


def test_the_plugin_must_be_allowed(checkpoint: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other,vllm_dsv4")
    command(checkpoint("full"))
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(OptionError, match="VLLM_PLUGINS is 'other'"):
        command(checkpoint("full"))


@pytest.fixture
def copy(checkpoint: Folder, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("full"), tmp_path / "copy")


def no_gpu(nodes: int) -> Gpus:
    raise AssertionError("a GPU was asked for before the checkpoint was found wrong")


def test_folders_are_refused_before_gpus_are_looked_at(
    copy: Path, checkpoints: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "detect_gpus", no_gpu)
    with pytest.raises(CheckpointError, match="there is no folder"):
        serve_command(copy / "none")
    empty = copy / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="no config.json"):
        serve_command(empty)
    (copy / "tokenizer.json").rename(copy / "tok")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: absent; .*Copy it from"):
        serve_command(copy)
    (copy / "tok").rename(copy / "tokenizer.json")
    checkpoints.change(copy, lambda tensors: tensors.pop("layers.2.attn.wkv.weight"))
    with pytest.raises(CheckpointError, match=r"expected layers\.2\.attn\.wkv\.weight or"):
        serve_command(copy)
    checkpoints.change_config(copy, lambda config: config.update(model_type="llama"))
    with pytest.raises(CheckpointError, match="model_type is 'llama'"):
        serve_command(copy)


def transpose(tensors: dict[str, Tensor]) -> None:
    name = "layers.2.attn.wq_b.weight_scale"
    tensors[name] = tensors[name].view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)


def test_what_the_doctor_sees_by_header_is_refused(
    copy: Path, checkpoints: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "detect_gpus", no_gpu)
    checkpoints.change(copy, transpose)
    message = (
        r"model\.safetensors, tensor layers\.2\.attn\.wq_b\.weight: .*expected.*"
        r"`vllm-dsv4 doctor .*` says more\. Or go on without this check: --skip-doctor"
    )
    with pytest.raises(CheckpointError, match=message):
        serve_command(copy)
    assert serve_command(copy, parse_gpus("H200:1"), skip_doctor=True).argv


def test_a_number_that_config_json_lacks_is_named(copy: Path, checkpoints: ModuleType) -> None:
    checkpoints.change_config(copy, lambda config: config.pop("sliding_window"))
    with pytest.raises(CheckpointError, match=r"config\.json: sliding_window: absent; expected"):
        command(copy)


def test_no_value_is_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """891 GB are judged by their headers, in seconds."""

    def read(*arguments: object) -> None:
        raise AssertionError("tensor data was read")

    for name in ("tensor", "read_into"):
        monkeypatch.setattr(Checkpoint, name, read)
    assert command(copy).argv


def test_the_longest_context_is_planned_as_vllm_reads_it(checkpoint: Folder) -> None:
    for text, tokens in (("2k", 2000), ("2K", 2048), ("auto", 8192)):
        plan = command(checkpoint("full"), f"--max-model-len {text}").plan
        assert plan.limits.max_model_len == tokens


def test_without_a_tokenizer_if_asked_for(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    assert command(copy, "--skip-tokenizer-init").argv
    assert command(copy, "--tokenizer elsewhere").argv


def test_unknown_tensors_and_config_gaps_are_noted(copy: Path, checkpoints: ModuleType) -> None:
    checkpoints.change(copy, lambda tensors: tensors.update(extra=tensors["norm.weight"].clone()))
    checkpoints.change_config(copy, lambda config: config.pop("topk_method"))
    notes = command(copy).notes
    assert any("1 tensors are not the model's and are not loaded: extra" in n for n in notes)
    assert any("topk_method is missing" in note for note in notes)


@pytest.mark.parametrize(
    ("said", "flag"),
    [
        ({"kv_cache_quant_algo": "FP8"}, "--kv-cache-dtype fp8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "--kv-cache-dtype fp8"),
        ({}, ""),
    ],
)
def test_the_kv_cache_as_the_checkpoint_says(
    copy: Path, checkpoints: ModuleType, said: dict[str, object], flag: str
) -> None:
    def edit(config: dict[str, dict[str, object]]) -> None:
        quantization = config["quantization_config"]
        for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
            quantization.pop(key, None)
        quantization.update(said)

    checkpoints.change_config(copy, edit)
    found = command(copy).line
    assert ("--kv-cache-dtype" in found) == bool(flag)
    assert flag in found


def test_a_kv_cache_that_does_not_exist_is_refused(copy: Path, checkpoints: ModuleType) -> None:
    def edit(config: dict[str, dict[str, object]]) -> None:
        config["quantization_config"].update(kv_cache_quant_algo="NVFP4")

    checkpoints.change_config(copy, edit)
    with pytest.raises(OptionError, match="a KV cache in NVFP4"):
        command(copy)
    assert "--kv-cache-dtype fp8" in command(copy, "--kv-cache-dtype fp8").line


def test_options_in_parts_count_in_the_plan(checkpoint: Folder) -> None:
    folder, part = checkpoint("full"), "--additional-config.vllm_dsv4.attn_dtype bf16"
    found = command(folder, part)
    assert found.argv[-2:] == tuple(part.split())
    assert found.plan.weights["attention"] > 2 * command(folder).plan.weights["attention"]


@pytest.mark.parametrize(
    "lost", [("quantization_config",), ("quant_method",), ("quantized_layers",)]
)
def test_nvfp4_that_config_json_does_not_claim_is_refused(
    copy: Path, checkpoints: ModuleType, lost: tuple[str]
) -> None:
    def edit(config: dict[str, dict[str, object]]) -> None:
        for key in lost:
            config.pop(key, None)
            config.get("quantization_config", {}).pop(key, None)

    checkpoints.change_config(copy, edit)
    with pytest.raises(CheckpointError, match=r"config\.json does not say that .* are NVFP4"):
        command(copy)


def test_the_reason_why_gpus_are_left_over(checkpoint: Folder) -> None:
    for words, reason in (("", "do not divide further"), ("-tp 1", "sizes that were given")):
        notes = command(checkpoint("full"), words, gpus="H200:8").notes
        assert any("of 8 GPUs are used" in note and reason in note for note in notes)


def test_ray_is_not_asked_for_where_vllm_spans_nodes_itself(checkpoint: Folder) -> None:
    found = command(checkpoint("full"), "--nnodes 2", gpus="H200:1", nodes=2)
    assert not any("Ray" in note for note in found.notes)
    assert "ray" not in found.line


def test_the_fused_kernel_is_refused_on_hopper(checkpoint: Folder) -> None:
    with pytest.raises(PlanError, match="runs on Blackwell of the data center only"):
        command(checkpoint("full"), "--moe-backend deep_gemm_mega_moe -ep")


def test_large_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pro on 8 H200 keeps vLLM's steps; on 8 smaller GPUs they shrink; on four it cannot be."""
    monkeypatch.setattr(serve, "read_servable", lambda *_, **__: released("pro"))
    usual = command(tmp_path, gpus="H200:8")
    assert "--max-num-batched-tokens" not in usual.line
    assert any("a context of about" in note for note in usual.notes)
    tight = command(tmp_path, gpus="H200:8:134")
    assert flags(tight).endswith("--max-model-len auto --max-num-batched-tokens 4096")
    own = command(tmp_path, "--max-num-batched-tokens 16384", gpus="H200:8:134")
    assert any("by the plan this does not fit" in note for note in own.notes)
    elsewhere = command(tmp_path, "--cpu-offload-gb 100", gpus="H200:4")
    (note,) = (note for note in elsewhere.notes if "does not fit" in note)
    (short,) = re.findall(r"does not fit, short by ([0-9.]+) GB", note)
    # A quarter of 872 GB of experts and more, on GPUs of which vLLM takes 138.1 GB.
    assert 218 - 138.1 < float(short) < 130
    # Where no step leaves room for a long context, the one that leaves most.
    least = command(tmp_path, gpus="H200:8:126.5")
    assert least.argv[-1] == "2048"
    assert 4096 < least.plan.longest < 65536
    with pytest.raises(PlanError, match="the weights take 225 GB on the fullest GPU"):
        command(tmp_path, gpus="H200:4")
    nodes = command(tmp_path, gpus="H200:8", nodes=2)
    assert any("start Ray on each of them first" in note for note in nodes.notes)


def test_the_line_is_quoted_for_a_shell(checkpoint: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "a folder's name"
    folder.symlink_to(checkpoint("full"))
    found = command(folder, options={"verify_load": True})
    assert shlex.split(found.line) == list(found.argv)
    assert found.line != " ".join(found.argv)
