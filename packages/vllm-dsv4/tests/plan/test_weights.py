"""Sizes of weights: against real files, the official listing, and how vLLM divides them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from nvfp4_codec import quantize_fp8_block, quantize_mxfp4, quantize_nvfp4
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig
from vllm_dsv4.errors import PlanError
from vllm_dsv4.gpus import parse_gpus
from vllm_dsv4.options import Options, runtime_formats
from vllm_dsv4.plan import Deployment, Limits, Model, choose_deployment, plan, released
from vllm_dsv4.plan.fit import whole
from vllm_dsv4.plan.models import released_config
from vllm_dsv4.plan.weights import linear_bytes, weights
from vllm_dsv4.stored import EXPERTS, Format, Stored, read_stored

CODEC = Path(__file__).parents[3] / "nvfp4-codec" / "tests" / "schemas" / "data"
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
GB = 1e9


@pytest.mark.parametrize("shape", [(256, 512), (130, 576)], ids=str)
def test_a_linears_bytes_are_those_of_the_codecs_tensors(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    size = lambda *tensors: sum(t.element_size() * t.numel() for t in tensors)  # noqa: E731
    input_scale = torch.ones(())
    assert linear_bytes("nvfp4", *shape) == size(*quantize_nvfp4(x), input_scale)
    assert linear_bytes("mxfp4", *shape) == size(*quantize_mxfp4(x))
    assert linear_bytes("fp8_block", *shape) == size(*quantize_fp8_block(x, scale_fmt="ue8m0"))
    assert linear_bytes("fp8_block", *shape, scale=4) == size(*quantize_fp8_block(x))
    assert linear_bytes("bf16", *shape) == size(x.bfloat16())


@pytest.mark.parametrize(
    "variant", ["full", "experts", "all-nvfp4", "wo-a-bf16", "no-mtp", "mtp-bf16"]
)
def test_a_checkpoints_bytes_are_those_of_its_file(
    variant: str, checkpoint: Callable[..., Path]
) -> None:
    folder = checkpoint(variant)
    (file,) = folder.glob("*.safetensors")
    with file.open("rb") as stream:
        (header,) = struct.unpack("<Q", stream.read(8))
    data = file.stat().st_size - 8 - header
    assert sum(whole(read_stored(folder)).values()) == data


def listed(model: str) -> dict[str, int]:
    """Bytes of the official checkpoint by the first part of the name, from its tensor listing."""
    found: dict[str, int] = {}
    for line in (CODEC / f"{model}.tensors.txt").read_text().splitlines():
        if line.startswith("#") or not line:
            continue
        name, blocks, experts, dtype, shape = line.split()
        count = 1
        for indices in (blocks, experts):
            if indices != "-":
                count *= sum(length(part) for part in indices.split(","))
        values = math.prod(map(int, shape.split("x"))) if shape != "-" else 1
        part = name.split(".")[0]
        found[part] = found.get(part, 0) + count * values * BYTES[dtype]
    return found


def length(indices: str) -> int:
    span, _, step = indices.partition(":")
    first, _, last = span.partition("-")
    return len(range(int(first), int(last or first) + 1, int(step or 1)))


@pytest.mark.parametrize("model", get_args(Model))
def test_a_released_model_has_the_size_of_its_official_listing(model: str) -> None:
    found, official = whole(released(model, "official")), listed(model)
    assert sum(found.values()) == sum(official.values())
    assert found["MTP"] == official["mtp"]


@pytest.mark.parametrize("model", get_args(Model))
def test_a_released_model_is_the_official_config(model: Model) -> None:
    official = json.loads((CODEC / f"{model}.config.json").read_text())
    ours = released_config(model)
    assert {key: ours.get(key) for key in official} == official
    assert ModelConfig.from_dict(ours) == ModelConfig.from_dict(official)


@pytest.mark.parametrize(
    ("preset", "with_mtp", "without"),
    [("official", 864.7, 850.7), ("experts", 913.9, 899.1), ("full", 905.7, 891.0),
     ("everything", 902.6, 888.1)],
)  # fmt: skip
def test_pro_in_every_preset(preset: str, with_mtp: float, without: float) -> None:
    found = whole(released("pro", preset))  # type: ignore[arg-type]
    total = sum(found.values())
    assert total / GB == pytest.approx(with_mtp, abs=0.05)
    assert (total - found["MTP"]) / GB == pytest.approx(without, abs=0.05)
    # Where most of it is: 61 blocks of 384 experts, three matrices each.
    values = 61 * 384 * 3 * 7168 * 3072
    per_value = 0.5 + 1 / 32 if preset == "official" else 0.5 + 1 / 16
    assert found["routed experts"] == pytest.approx(values * per_value, rel=1e-5)


def test_tensor_parallelism_divides_what_goes_by_heads_and_replicates_the_rest() -> None:
    stored = released("pro")
    one = weights(stored, stored.formats, Deployment(), mtp=False)
    eight = weights(stored, stored.formats, Deployment(8, expert_parallel=True), mtp=False)
    for part in ("routed experts", "shared experts", "embeddings and head"):
        assert eight[part] == pytest.approx(one[part] / 8, rel=1e-4)  # type: ignore[index]
    for part in ("compressors and indexer", "gates, norms, streams"):
        assert eight[part] == one[part]  # type: ignore[index]
    # wq_a, wkv and the sinks are replicated; wq_b, wo_a, wo_b divided.
    replicated = 61 * ((1536 + 512) * 7168 * 9 // 16 + 16 + 128 * 4)
    assert eight["attention"] == pytest.approx(
        replicated + (one["attention"] - replicated) / 8, rel=1e-6
    )
    assert "MTP" not in eight


def test_the_fused_kernel_replicates_the_shared_experts() -> None:
    stored = released("pro")
    fused = Deployment(8, expert_parallel=True, mega_moe=True)
    one = weights(stored, stored.formats, Deployment())
    assert weights(stored, stored.formats, fused)["shared experts"] == one["shared experts"]
    # Not across a pipeline, where tokens are not divided.
    staged = weights(stored, stored.formats, Deployment(8, 2, 1, True, True), stage=1)
    assert staged["shared experts"] == pytest.approx(one["shared experts"] * 30 / 61 / 8, rel=1e-4)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_pipeline_stages_add_up_to_the_model(stages: int) -> None:
    stored = released("flash")
    deployment = Deployment(pipeline_parallel=stages)
    found = [weights(stored, stored.formats, deployment, stage=s) for s in range(stages)]
    together = sum(sum(parts.values()) for parts in found)
    assert together == sum(whole(stored).values())
    assert [("MTP" in parts) for parts in found] == [False] * (stages - 1) + [True]


def test_what_runs_is_larger_than_what_is_stored_where_compressors_were_nvfp4() -> None:
    stored = released("pro", "everything")
    formats = runtime_formats(stored, Options(attn_dtype="bf16"))
    runs, lies = weights(stored, formats, Deployment()), whole(stored)
    assert runs["compressors and indexer"] > lies["compressors and indexer"]
    # Attention in BF16, but for wo_a, which is FP8.
    wo_a = 61 * 16384 * 4096
    others = 61 * ((1536 + 512) * 7168 + 65536 * 1536 + 7168 * 16384)
    assert runs["attention"] == pytest.approx(2 * others + wo_a, rel=1e-3)
    assert runs["routed experts"] == lies["routed experts"]


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(PlanError, match="'v5' is not known; known are pro, flash"):
        released("v5")


@pytest.mark.parametrize(
    ("gpus", "nodes", "model", "expected"),
    [
        ("B200:8", 1, "pro", Deployment(8, 1, 1, True, True)),
        ("H200:8", 1, "pro", Deployment(8, 1, 1, True, False)),
        ("H200:8", 2, "pro", Deployment(8, 2, 1, True, False)),
        ("B200:8", 2, "pro", Deployment(8, 2, 1, True, False)),
        ("B200:1", 1, "flash", Deployment(1, 1, 1, True, True)),
        ("H200:1", 1, "flash", Deployment(1, 1, 1, False, False)),
        ("H200:6", 1, "flash", Deployment(4, 1, 1, True, False)),
        ("H200:16", 1, "flash", Deployment(8, 1, 1, True, False)),
    ],
)
def test_the_deployment_that_suits(gpus: str, nodes: int, model: str, expected: Deployment) -> None:
    stored = released(model)
    chosen = choose_deployment(parse_gpus(gpus, nodes), stored)
    assert chosen == expected
    chosen.check(stored.schema.config)


def test_given_sizes_are_kept() -> None:
    stored, gpus = released("pro"), parse_gpus("B200:8")
    assert choose_deployment(gpus, stored, data_parallel=8) == Deployment(1, 1, 8, True, True)
    assert choose_deployment(gpus, stored, tensor_parallel=4) == Deployment(4, 1, 1, True, True)
    assert choose_deployment(gpus, stored, pipeline_parallel=2) == Deployment(4, 2, 1, True, False)
    off = choose_deployment(gpus, stored, expert_parallel=False)
    assert off == Deployment(8, 1, 1, False, False)
    assert choose_deployment(gpus, stored, mega_moe=False) == Deployment(8, 1, 1, True, False)


def with_experts(own: Format, block: str = "layers.") -> Stored:
    """Pro in full NVFP4, the routed experts of some blocks in another format."""
    stored = released("pro")
    changed = {name: own for name in stored.formats
               if name.startswith(block) and name.endswith(EXPERTS)}  # fmt: skip
    return replace(stored, formats={**stored.formats, **changed})


@pytest.mark.parametrize("own", ["bf16", "fp8_block"])
def test_the_fused_kernel_is_for_fp4_experts(own: Format) -> None:
    """vLLM's DeepGemmMegaMoEExperts has two weight formats, MXFP4 and NVFP4: others do not load."""
    stored, gpus = with_experts(own), parse_gpus("B200:8")
    chosen = choose_deployment(gpus, stored)
    assert chosen == Deployment(8, 1, 1, True, False)
    assert "MegaMoE buffer" not in plan(stored, gpus, chosen, Limits(4096)).buffers
    fused = Deployment(8, 1, 1, True, True)
    with pytest.raises(PlanError, match=f"stored as {own}, and MegaMoE .* takes mxfp4 and nvfp4"):
        plan(stored, gpus, fused, Limits(4096))
    assert choose_deployment(gpus, with_experts("mxfp4")) == fused
    # A kernel from elsewhere is given NVFP4.
    with pytest.raises(PlanError, match="and --moe-kernel some takes nvfp4 only"):
        plan(with_experts("mxfp4"), gpus, fused, Limits(4096), Options(moe_kernel="some"))


def test_drafting_blocks_share_the_models_kernel() -> None:
    """vLLM builds MTP blocks with the same --moe-backend; modelopt's exports have them in BF16."""
    stored, gpus = with_experts("bf16", "mtp."), parse_gpus("B200:8")
    assert choose_deployment(gpus, stored).mega_moe
    assert not choose_deployment(gpus, stored, mtp=True).mega_moe


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        (Deployment(3), "128 attention heads cannot be divided over a tensor parallel size of 3"),
        (Deployment(32), "16 output groups .* cannot be divided .* of 32"),
        (Deployment(1, 1, 5, True), "384 experts cannot be divided over 5 GPUs"),
        (Deployment(8, mega_moe=True), "needs expert parallelism"),
    ],
)
def test_divisions_that_vllm_refuses_are_refused(deployment: Deployment, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        deployment.check(released("pro").schema.config)
