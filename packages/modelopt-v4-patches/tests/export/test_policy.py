"""The table of the presets, and what the options may not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelopt_v4_patches.errors import PolicyError
from modelopt_v4_patches.policy import RULES, ExportOptions, check_exact
from nvfp4_codec.schemas.deepseek_v4 import Entry, ModelConfig, Schema

TINY = Path(__file__).parents[4] / "tests" / "assets" / "tiny-dsv4" / "config.json"


def entries(**changes: Any) -> list[Entry]:
    config = {**json.loads(TINY.read_text()), **changes}
    return list(Schema(ModelConfig.from_dict(config)).entries())


DSPARK = {"dspark_target_layer_ids": [1], "dspark_markov_rank": 8}


@pytest.mark.parametrize("changes", [{}, DSPARK], ids=["mtp", "dspark"])
@pytest.mark.parametrize(
    ("preset", "packed"),
    [
        ("experts", {"routed_expert"}),
        (
            "full",
            {"routed_expert", "wq_a", "wkv", "wq_b", "wo_b", "shared_expert", "indexer_wq_b"},
        ),
    ],
)
def test_presets(preset: Any, packed: set[str], changes: dict[str, Any]) -> None:
    options = ExportOptions(preset=preset)
    for entry in entries(**changes):
        inside = entry.role in packed and (not entry.in_mtp or entry.role == "routed_expert")
        assert options.layout(entry) == ("nvfp4" if inside else "official"), entry.name()


@pytest.mark.parametrize("rule", RULES[1:], ids=lambda rule: rule.part)
@pytest.mark.parametrize("preset", ["experts", "full"])
def test_a_flag_moves_its_own_roles_and_nothing_else(rule: Any, preset: Any) -> None:
    plain = ExportOptions(preset=preset)
    for choice in rule.choices:
        options = ExportOptions(preset=preset, **{rule.part: choice})
        for entry in entries():
            if entry.role not in rule.roles or entry.in_mtp:
                assert options.layout(entry) == plain.layout(entry)
                continue
            official = "fp8" if entry.format == "fp8_block" else "bf16"
            expected = {"nvfp4": "nvfp4", official: "official"}.get(choice, "plain")
            assert options.layout(entry) == expected


def test_mtp_can_be_dropped() -> None:
    options = ExportOptions(mtp="drop")
    assert {options.layout(e) is None for e in entries() if e.in_mtp} == {True}
    assert all(options.layout(e) for e in entries() if not e.in_mtp)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"attn": "int4"}, "attn is 'int4'; expected one of nvfp4, fp8, bf16"),
        ({"compressor": "fp8"}, "compressor is 'fp8'; expected one of bf16, nvfp4"),
        ({"preset": "all"}, "preset is 'all'; expected one of full, experts"),
        ({"mtp": None}, "mtp is None"),
        ({"kv_cache": "fp8"}, "kv_cache is 'fp8'; expected one of fp8_cast, none"),
    ],
)
def test_unknown_choices_are_refused(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        ExportOptions(**choice)


def test_no_option_reaches_the_experts_and_fp8_experts_are_refused() -> None:
    with pytest.raises(TypeError, match="experts"):
        ExportOptions(experts="bf16")  # type: ignore[call-arg]
    config = {**json.loads(TINY.read_text()), "expert_dtype": "fp8"}
    with pytest.raises(PolicyError, match="expert_dtype is 'fp4'"):
        check_exact(ModelConfig.from_dict(config))
