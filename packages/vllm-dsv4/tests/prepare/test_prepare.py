"""What `prepare` writes: the experts-only layout, values by plain formulas, the config."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_codec import dequantize_nvfp4
from nvfp4_codec.errors import CheckpointError
from vllm_dsv4 import __version__
from vllm_dsv4.cli import main
from vllm_dsv4.errors import OptionError, StoredError
from vllm_dsv4.prepare import MANIFEST, prepare_checkpoint
from vllm_dsv4.stored import read_stored

Checkpoint = Callable[..., Path]
ASSETS = Path(__file__).parents[4] / "tests" / "assets"

VARIANTS = ["full", "all-nvfp4", "wo-a-bf16", "no-mtp", "mtp-bf16", "two-scales"]


@pytest.fixture(scope="session")
def prepared(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A variant of the tiny model, prepared; made once, to be read only."""
    base = tmp_path_factory.mktemp("prepared")

    def get(variant: str = "full", scheme: str = "official") -> Path:
        output = base / f"{variant}-{scheme}"
        if not output.exists():
            prepare_checkpoint(checkpoint(variant, scheme), output)
        return output

    return get


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_shapes_and_dtypes_are_those_of_the_experts_preset(
    variant: str, prepared: Callable[..., Path], checkpoint: Checkpoint, checkpoints: ModuleType
) -> None:
    expected = checkpoints.read(checkpoint("experts"))
    if variant == "no-mtp":
        expected = {name: t for name, t in expected.items() if not name.startswith("mtp.")}
    found = checkpoints.read(prepared(variant))
    as_headers = {name: (t.dtype, t.shape) for name, t in found.items()}
    assert as_headers == {name: (t.dtype, t.shape) for name, t in expected.items()}
    # Not only the headers agree: everything that the full preset leaves official is the same.
    for name in found:
        if variant == "full" and name.startswith(("layers.0.attn.wo_a", "embed", "layers.1.hc")):
            assert torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))


def fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round to E4M3 with the smallest power of two per 128x128 block that keeps it below 448."""
    rows, columns = values.shape
    tall, wide = -(-rows // 128), -(-columns // 128)
    padded = torch.zeros(tall * 128, wide * 128)
    padded[:rows, :columns] = values
    blocks = padded.view(tall, 128, wide, 128)
    amax = blocks.abs().amax(dim=(1, 3)).double()
    exponent = torch.ceil(torch.log2(amax / 448)).clamp(-127, 127)
    scaled = blocks / (2.0**exponent).float()[:, None, :, None]
    codes = scaled.to(torch.float8_e4m3fn).view(tall * 128, wide * 128)[:rows, :columns]
    return codes, (exponent + 127).to(torch.uint8)


@pytest.mark.parametrize("variant", ["all-nvfp4", "wo-a-bf16", "mtp-bf16"])
def test_values_by_plain_formulas(
    variant: str,
    prepared: Callable[..., Path],
    checkpoint: Checkpoint,
    checkpoints: ModuleType,
    oracle: ModuleType,
) -> None:
    source, found = checkpoints.read(checkpoint(variant)), checkpoints.read(prepared(variant))
    compared = set()
    for name in found:
        module, _, part = name.rpartition(".")
        if part != "weight" or ".ffn.experts." in name or name == "embed.weight":
            continue
        meant = oracle.values(source, module)
        if f"{module}.scale" not in found:
            assert torch.equal(found[name].float(), meant.to(torch.bfloat16).float()), name
            continue
        if source[name].dtype == torch.float8_e4m3fn:  # official bytes, untouched
            assert oracle.same(found[name], source[name])
            assert oracle.same(found[f"{module}.scale"], source[f"{module}.scale"])
            continue
        codes, exponents = fp8(meant.float())
        assert torch.equal(found[f"{module}.scale"].view(torch.uint8), exponents), name
        assert torch.equal(found[name].float(), codes.float()), name
        compared.add(module.rpartition(".")[2])
    expected = {"all-nvfp4": {"wq_a", "wkv", "wq_b", "wo_a", "wo_b", "w1", "w2", "w3"},
                "wo-a-bf16": {"wo_a"}, "mtp-bf16": {"e_proj", "h_proj"}}  # fmt: skip
    assert expected[variant] <= compared


def test_experts_keep_every_byte(
    prepared: Callable[..., Path], checkpoint: Checkpoint, checkpoints: ModuleType,
    oracle: ModuleType,
) -> None:  # fmt: skip
    source, found = checkpoints.read(checkpoint("full")), checkpoints.read(prepared("full", "hf"))
    names = [name for name in found if ".ffn.experts." in name]
    assert len(names) == 5 * 16 * 3 * 4
    assert all(oracle.same(found[name], source[name]) for name in names)


def test_experts_with_two_scales_share_the_larger(
    prepared: Callable[..., Path], checkpoint: Checkpoint, checkpoints: ModuleType,
    oracle: ModuleType,
) -> None:  # fmt: skip
    source = checkpoints.read(checkpoint("two-scales"))
    found = checkpoints.read(prepared("two-scales"))
    changed = 0
    for name in [n for n in found if n.endswith(".w1.weight_scale_2") and ".experts." in n]:
        w1 = name.removesuffix(".weight_scale_2")
        w3 = f"{w1[:-1]}3"
        for part, of in (("weight_scale_2", torch.maximum), ("input_scale", torch.maximum)):
            shared = of(source[f"{w1}.{part}"], source[f"{w3}.{part}"])
            assert found[f"{w1}.{part}"] == found[f"{w3}.{part}"] == shared
        for module in (w1, w3):
            assert oracle.same(found[f"{module}.weight"], source[f"{module}.weight"])
            meant, is_now = oracle.values(source, module), oracle.values(found, module)
            # A block's scale is rounded once more: by at most one part in 16, or the least E4M3.
            least = 2.0**-10 * 6 * float(found[f"{module}.weight_scale_2"])
            assert bool(((is_now - meant).abs() <= meant.abs() / 16 + least).all())
            changed += not torch.equal(is_now, meant)
    assert changed > 10
    notes = json.loads((prepared("two-scales") / MANIFEST).read_text())["notes"]
    assert sum("inexact_blocks" in note for note in notes.values()) == 2 * 5 * 16


@pytest.mark.parametrize("scheme", ["official", "hf", "half_converted"])
def test_config_json_is_the_contracts(scheme: str, prepared: Callable[..., Path]) -> None:
    found = json.loads((prepared("full", scheme) / "config.json").read_text())
    expected = json.loads((ASSETS / "config_experts.json").read_text())
    producer = {"name": "vllm-dsv4", "version": __version__}
    assert found["quantization_config"].pop("producer") == producer
    expected["quantization_config"].pop("producer")
    # What transformers adds in its own dialect stays; its rope has no theta of its own.
    extra = {"layer_types", "mlp_layer_types"} if scheme != "official" else set()
    assert found.keys() - expected.keys() == extra
    if scheme != "official":
        del expected["rope_scaling"]["rope_theta"]
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("scheme", ["official", "hf", "half_converted"])
def test_every_scheme_gives_the_same_tensors(
    scheme: str, prepared: Callable[..., Path], checkpoints: ModuleType, oracle: ModuleType
) -> None:
    first, found = (
        checkpoints.read(prepared("all-nvfp4")),
        checkpoints.read(prepared("all-nvfp4", scheme)),
    )
    assert first.keys() == found.keys()
    assert all(oracle.same(first[name], found[name]) for name in first)


def test_the_other_files(prepared: Callable[..., Path], checkpoint: Checkpoint) -> None:
    output, source = prepared("full"), checkpoint("full")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (output / name).read_bytes() == (source / name).read_bytes()
    document = json.loads((output / "hf_quant_config.json").read_text())
    block = json.loads((output / "config.json").read_text())["quantization_config"]
    assert document["quantization"]["quantized_layers"] == block["quantized_layers"]
    assert document["quantization"]["exclude_modules"] == block["ignore"]
    assert not (output / "export_manifest.json").exists()


def test_without_mtp_the_config_says_so(prepared: Callable[..., Path]) -> None:
    config = json.loads((prepared("no-mtp") / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    assert not any(name.startswith("mtp") for name in config["quantization_config"]["ignore"])
    assert read_stored(prepared("no-mtp")).missing == ()


def test_the_report_says_what_was_done(checkpoint: Checkpoint, tmp_path: Path) -> None:
    report = prepare_checkpoint(checkpoint("all-nvfp4", "hf"), tmp_path / "out")
    assert report.linears["routed_expert", "nvfp4", "nvfp4"] == 5 * 16 * 3
    assert report.linears["compressor", "nvfp4", "bf16"] == 8
    assert report.linears["wo_a", "nvfp4", "fp8_block"] == 4
    assert report.linears["mtp_proj", "fp8_block", "fp8_block"] == 2
    assert "layers.0.attn.wq_b" in report.requantized
    # E4M3 has four bits of mantissa: 2^-4 at most, and more in the subnormals.
    costs = report.requantized.values()
    assert all(cost["sqnr_db"] > 28 for cost in costs)
    assert report.unified == {}
    assert report.outcome.written == ("model.safetensors",)


def test_what_it_wrote_needs_no_preparing(prepared: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(StoredError, match="has the layout already"):
        prepare_checkpoint(prepared("full"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_only_under_hf_names_becomes_official(
    prepared: Callable[..., Path], checkpoint: Checkpoint, checkpoints: ModuleType,
    oracle: ModuleType,
) -> None:  # fmt: skip
    expected = checkpoints.read(checkpoint("experts"))
    found = checkpoints.read(prepared("experts", "hf"))
    assert expected.keys() == found.keys()
    assert all(oracle.same(expected[name], found[name]) for name in expected)


def test_the_official_checkpoint_is_refused(checkpoints: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(StoredError, match=r"layers.0.ffn.experts are stored as mxfp4"):
        prepare_checkpoint(checkpoints.TINY, tmp_path / "out")


def without_input_scale(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if ".ffn.experts." in n and n.endswith(".input_scale")]:
        del tensors[name]


def without_weight(tensors: dict[str, Tensor]) -> None:
    del tensors["layers.1.attn.wq_b.weight"]


def nan_scale(tensors: dict[str, Tensor]) -> None:
    tensors["layers.1.attn.wq_b.weight_scale"].view(torch.uint8)[0, 0] = 0x7F


def zero_scale_2(tensors: dict[str, Tensor]) -> None:
    tensors["layers.2.ffn.experts.3.w1.weight_scale_2"].zero_()


SCALE_2 = "weight_scale_2"
EXPERT = "layers.2.ffn.experts.3.w1"
HIDDEN: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "a reciprocal": ("layers.1.attn.wq_a.weight_scale_2", lambda t: 1 / t),
    "a sign": ("layers.1.attn.wq_b.weight_scale", lambda t: -t.float()),
    "an expert's sign": (f"{EXPERT}.weight_scale", lambda t: -t.float()),
    "two global scales": (f"{EXPERT}.weight_scale_2", lambda t: t.repeat(2)),
    "no global scale": (f"{EXPERT}.weight_scale_2", lambda t: t.repeat(0)),
    "scales in FP32": (f"{EXPERT}.weight_scale", lambda t: t.float()),
    "no scales": (f"{EXPERT}.weight_scale", lambda t: t[:0]),
    "an input scale of zero": (f"{EXPERT}.input_scale", lambda t: t * 0),
    "NaN in a norm": ("layers.1.attn.kv_norm.weight", lambda t: t * float("nan")),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_a_fault_that_the_output_would_hide_or_keep_is_refused(
    case: str, checkpoint: Checkpoint, checkpoints: ModuleType, tmp_path: Path
) -> None:
    name, edit = HIDDEN[case]

    def change(tensors: dict[str, Tensor]) -> None:
        changed = edit(tensors[name])
        keeps = case.endswith("sign")
        tensors[name] = changed.to(tensors[name].dtype) if keeps else changed.clone()

    source = shutil.copytree(checkpoint("full"), tmp_path / "in")
    checkpoints.change(source, change)
    module = name.rpartition(".")[0].replace(".", r"\.")
    with pytest.raises(CheckpointError, match=f"tensor {module}.*vllm-dsv4 doctor"):
        prepare_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_suspected_is_refused_unless_asked_for(
    checkpoint: Checkpoint, checkpoints: ModuleType, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def swap_nibbles(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".weight") and tensor.dtype == torch.uint8:
                tensors[name] = tensor >> 4 | tensor << 4

    source = shutil.copytree(checkpoint("full"), tmp_path / "in")
    checkpoints.change(source, swap_nibbles)
    command = ["prepare", str(source), str(tmp_path / "out")]
    assert main(command) == 2
    assert re.search(r"swapped-nibbles.*--allow-suspected", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    assert main([*command, "--allow-suspected"]) == 0


def test_a_config_that_does_not_fit_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint("full"), tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    del config["rope_scaling"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="rope-missing"):
        prepare_checkpoint(source, tmp_path / "out")


def test_a_broken_link_is_named(
    checkpoint: Checkpoint, checkpoints: ModuleType, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source = checkpoints.split(shutil.copytree(checkpoint("full"), tmp_path / "in"))
    shard = source / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.symlink_to("nowhere")
    assert main(["prepare", str(source), str(tmp_path / "out")]) == 2
    assert "model-00002-of-00003.safetensors: is a broken link" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (without_input_scale, StoredError, "layers.0.ffn.experts have no input_scale"),
        (without_weight, CheckpointError, r"layers\.1\.attn\.wq_b.weight.*tensors are missing"),
        (nan_scale, CheckpointError, r"tensor layers\.1\.attn\.wq_b\.weight: .*NaN"),
        (zero_scale_2, CheckpointError, r"tensor layers\.2\.ffn\.experts\.3\.w[13]"),
    ],
)
def test_a_damaged_source_is_refused_by_tensor(
    edit: Any, error: type[Exception], message: str, checkpoint: Checkpoint,
    checkpoints: ModuleType, tmp_path: Path,
) -> None:  # fmt: skip
    source = shutil.copytree(checkpoint("full"), tmp_path / "in")
    checkpoints.change(source, edit)
    with pytest.raises(error, match=f"(?s){message}"):
        prepare_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_tensors_are_left_out_and_told(
    checkpoint: Checkpoint, checkpoints: ModuleType, tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint("full"), tmp_path / "in")
    checkpoints.change(source, lambda tensors: tensors.update(extra=torch.zeros(3)))
    report = prepare_checkpoint(source, tmp_path / "out")
    assert report.unknown == ("extra",)
    assert "extra" not in checkpoints.read(tmp_path / "out")


def test_a_kv_cache_that_does_not_exist_is_refused(
    checkpoint: Checkpoint, checkpoints: ModuleType, tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint("full"), tmp_path / "in")
    edit = lambda c: c["quantization_config"].update(kv_cache_quant_algo="INT8")  # noqa: E731
    checkpoints.change_config(source, edit)
    with pytest.raises(OptionError, match="a KV cache in INT8"):
        prepare_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("existed", [False, True], ids=["new", "an empty one of the user's"])
def test_a_full_disk_leaves_no_folder_behind(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    output = tmp_path / "out"
    if existed:
        output.mkdir()
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
        with pytest.raises(CheckpointError, match="the disk is full: .* bytes are needed"):
            prepare_checkpoint(checkpoint("full"), output)
    assert output.exists() == existed
    prepare_checkpoint(checkpoint("full"), output)  # not an interrupted run


def experts_to_bf16(block: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(f"{block}.ffn.experts.")]:
            module, _, part = name.rpartition(".")
            if part == "weight":
                scales = (tensors[f"{module}.{scale}"] for scale in ("weight_scale", SCALE_2))
                tensors[name] = dequantize_nvfp4(tensors[name], *scales, dtype=torch.bfloat16)
        for name in [n for n in tensors if n.startswith(f"{block}.ffn.experts.")]:
            if not name.endswith(".weight"):
                del tensors[name]

    return edit


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("mtp.0", "stock vLLM reads MTP experts in the format of all others, NVFP4, .*"
                  "Serve this checkpoint with the plugin.*--mtp drop"),
        ("layers.1", "prepare keeps NVFP4 experts as they are and makes none"),
    ],
)  # fmt: skip
def test_experts_that_are_not_nvfp4_are_refused_with_what_to_do(
    block: str, message: str, checkpoint: Checkpoint, checkpoints: ModuleType, tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint("full"), tmp_path / "in")
    checkpoints.change(source, experts_to_bf16(block))
    with pytest.raises(StoredError, match=rf"{block}\.ffn\.experts are stored as bf16.*{message}"):
        prepare_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_never_in_place(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint("full"), tmp_path / "in")
    for output in (source, source / "out"):
        with pytest.raises(CheckpointError, match="exists already|is in the input"):
            prepare_checkpoint(source, output)
    with pytest.raises(CheckpointError, match="is in the input"):
        prepare_checkpoint(source, source, resume=True)
