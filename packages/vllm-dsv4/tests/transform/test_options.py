"""What may be chosen, and in which format everything therefore runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_dsv4.errors import OptionError
from vllm_dsv4.options import Options, disagreeing, runtime_formats
from vllm_dsv4.stored import read_stored


def test_a_mapping_and_back():
    options = Options(wo_a_dtype="bf16", attn_dtype="fp8", verify_load=True, moe_kernel="megamoe")
    assert Options.from_mapping(options.to_mapping()) == options
    assert Options().to_mapping() == {}
    assert Options.from_mapping(None) == Options()
    assert Options() == Options("fp8", "stored", "stored", "stored", False, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wo_dtype": "fp8"}, "wo_dtype: no such option; known are wo_a_dtype"),
        ({"wo_a_dtype": "nvfp4"}, "wo_a_dtype is 'nvfp4'; choose one of fp8, bf16"),
        ({"attn_dtype": "int8"}, "attn_dtype is 'int8'"),
        ({"shared_dtype": None}, "shared_dtype is None"),
        ({"indexer_dtype": "mxfp4"}, "indexer_dtype is 'mxfp4'"),
        ({"verify_load": "yes"}, "verify_load is 'yes'"),
        ({"moe_kernel": 1}, "moe_kernel is 1"),
        ("attn_dtype=fp8", r"additional_config\['vllm_dsv4'\] is str; give a JSON object"),
    ],
)
def test_wrong_ones_are_refused_by_name(given, message):
    with pytest.raises(OptionError, match=message):
        Options.from_mapping(given)


ATTN = ("wq_a", "wkv", "wq_b", "wo_b")


@pytest.mark.parametrize(
    ("option", "moved"),
    [
        ("attn_dtype", {f"layers.2.attn.{n}" for n in ATTN} | {f"mtp.0.attn.{n}" for n in ATTN}),
        ("shared_dtype", {f"{b}.ffn.shared_experts.{w}" for b in ("layers.2", "mtp.0")
                          for w in ("w1", "w2", "w3")}),
        ("indexer_dtype", {"layers.2.attn.indexer.wq_b"}),
        ("wo_a_dtype", {"layers.2.attn.wo_a", "mtp.0.attn.wo_a"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "runs"), [("fp8", "fp8_block"), ("bf16", "bf16")])
def test_an_option_moves_its_linears_and_no_others(checkpoint, option, moved, dtype, runs):
    stored = read_stored(checkpoint("full"))
    default = runtime_formats(stored, Options())
    found = runtime_formats(stored, Options(**{option: dtype}))
    here = {m for m in found if m.startswith(("layers.2.", "mtp.0."))}
    assert {m for m in here if found[m] == runs and m in moved} == moved
    assert {m: found[m] for m in here - moved} == {m: default[m] for m in here - moved}


def test_the_default_keeps_what_is_stored_but_for_compressors_and_wo_a(checkpoint):
    stored = read_stored(checkpoint("all-nvfp4"))
    found = runtime_formats(stored, Options())
    changed = {m: found[m] for m in found if found[m] != stored.formats[m]}
    compressed = [(1, "attn.compressor"), (2, "attn.compressor"), (2, "attn.indexer.compressor"),
                  (3, "attn.compressor")]  # fmt: skip
    expected = {f"layers.{i}.attn.wo_a": "fp8_block" for i in range(4)}
    expected |= {f"layers.{i}.{c}.{w}": "bf16" for i, c in compressed for w in ("wkv", "wgate")}
    assert changed == expected


@pytest.mark.parametrize(
    "module",
    ["layers.2.ffn.gate", "layers.2.attn.indexer.weights_proj", "head", "mtp.0.ffn.gate"],
)
def test_what_vllm_builds_unquantized_runs_so_however_it_is_stored(checkpoint, module):
    stored = read_stored(checkpoint("full"))
    stored = replace(stored, formats={**stored.formats, module: "nvfp4"})
    options = Options(attn_dtype="nvfp4", shared_dtype="nvfp4", indexer_dtype="nvfp4")
    assert runtime_formats(stored, options)[module] == "bf16"


@pytest.mark.parametrize("own", ["mxfp4", "nvfp4", "fp8_block", "bf16"])
def test_routed_experts_stay_as_they_are(checkpoint, own):
    stored = read_stored(checkpoint("full"))
    stored = replace(stored, formats={**stored.formats, "layers.1.ffn.experts": own})
    for dtype in ("fp8", "bf16"):
        options = Options(dtype, dtype, dtype, dtype)
        found = runtime_formats(stored, options)
        assert found["layers.1.ffn.experts"] == own
        assert [m for m in found if found[m] == "mxfp4"] == (
            ["layers.1.ffn.experts"] if own == "mxfp4" else []
        )


@pytest.mark.parametrize("pair", [("attn.wq_a", "attn.wkv"),
                                  ("ffn.shared_experts.w1", "ffn.shared_experts.w3")])  # fmt: skip
@pytest.mark.parametrize("other", ["fp8_block", "bf16"])
@pytest.mark.parametrize("which", [0, 1])
def test_fused_partners_run_alike(checkpoint, pair, other, which):
    stored = read_stored(checkpoint("full"))
    module = f"layers.1.{pair[which]}"
    stored = replace(stored, formats={**stored.formats, module: other})
    found = runtime_formats(stored, Options())
    assert [found[f"layers.1.{name}"] for name in pair] == ["bf16", "bf16"]
    assert found["layers.0.attn.wq_a"] == found["layers.1.attn.wq_b"] == "nvfp4"
    assert set(disagreeing(stored, Options())) == {f"layers.1.{name}" for name in pair}


@pytest.mark.parametrize("option", ["attn_dtype", "shared_dtype", "indexer_dtype"])
def test_nvfp4_is_kept_and_never_made(checkpoint, option):
    full, experts = read_stored(checkpoint("full")), read_stored(checkpoint("experts"))
    options = Options(**{option: "nvfp4"})
    # the MTP blocks of `full` are FP8, and no calibration reaches them
    assert runtime_formats(full, options) == runtime_formats(full, Options())
    with pytest.raises(OptionError, match=rf"{option} asks for NVFP4.*\(fp8_block\)"):
        runtime_formats(experts, options)


def test_nvfp4_without_an_activation_scale_does_not_run(checkpoint):
    stored = replace(read_stored(checkpoint("full")), weight_only=frozenset({"layers.1.attn.wq_b"}))
    with pytest.raises(OptionError, match=r"layers.1.attn.wq_b.*Set attn_dtype to 'fp8' or 'bf16'"):
        runtime_formats(stored, Options())
    assert runtime_formats(stored, Options(attn_dtype="bf16"))["layers.1.attn.wq_b"] == "bf16"
    two = replace(
        stored, weight_only=frozenset({"layers.1.attn.wq_b", "layers.2.attn.indexer.wq_b"})
    )
    with pytest.raises(OptionError, match="Set attn_dtype and indexer_dtype to"):
        runtime_formats(two, Options())
    for also in ((), ("layers.0.attn.wq_b",)):
        experts = replace(stored, weight_only=frozenset({"layers.1.ffn.experts", *also}))
        with pytest.raises(OptionError, match=r"layers.1.ffn.experts.*Export the model again"):
            runtime_formats(experts, Options())


def test_what_no_option_moves_is_not_blamed_on_one(checkpoint):
    stored = read_stored(checkpoint("full"))
    module = "mtp.0.e_proj"
    packed = replace(
        stored, formats={**stored.formats, module: "nvfp4"}, weight_only=frozenset({module})
    )
    with pytest.raises(OptionError, match=r"mtp.0.e_proj.*Export the model again"):
        runtime_formats(packed, Options())


def test_a_partner_that_is_missing_does_not_disagree(checkpoint):
    stored = read_stored(checkpoint("full"))
    formats = {m: own for m, own in stored.formats.items() if m != "layers.1.attn.wkv"}
    stored = replace(stored, formats=formats)
    assert disagreeing(stored, Options()) == ()
    assert runtime_formats(stored, Options())["layers.1.attn.wq_a"] == "nvfp4"


def test_the_option_that_helps_is_named_beside_what_has_none(checkpoint):
    """MTP projections have no option, beside others that have one."""
    stored = replace(read_stored(checkpoint("full")),
                     weight_only=frozenset({"mtp.0.e_proj", "layers.1.attn.wq_b"}))  # fmt: skip
    stored = replace(stored, formats={**stored.formats, "mtp.0.e_proj": "nvfp4"})
    with pytest.raises(OptionError, match="Set attn_dtype to"):
        runtime_formats(stored, Options())


def test_mtp_projections_stay_as_stored(checkpoint):
    for variant, own in (("full", "fp8_block"), ("mtp-bf16", "bf16")):
        stored = read_stored(checkpoint(variant))
        found = runtime_formats(stored, Options())
        assert {found[f"mtp.0.{name}"] for name in ("e_proj", "h_proj")} == {own}
