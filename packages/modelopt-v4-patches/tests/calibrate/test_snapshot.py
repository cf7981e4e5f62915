"""The snapshot file: whole or absent, checked on reading, and its names understood."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from modelopt_v4_patches import Snapshot
from modelopt_v4_patches.errors import SnapshotError
from modelopt_v4_patches.snapshot import config_sha256


def snapshot(metadata: Mapping[str, str], **amax: object) -> Snapshot:
    """A snapshot of quantizers given as name=value, with __ for each dot."""
    return from_names(metadata, {name.replace("__", "."): value for name, value in amax.items()})


def from_names(metadata: Mapping[str, str], amax: Mapping[str, object]) -> Snapshot:
    tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in amax.items()}
    about = {name: {"shape": list(tensor.shape)} for name, tensor in tensors.items()}
    return Snapshot(tensors, {**metadata, "quantizers": json.dumps(about)})


LAYER = "model.layers.3"
NAMES = {
    # as modelopt 0.45 to 0.47 name them
    f"{LAYER}.self_attn.q_a_proj.input_quantizer": ["layers.3.attn.wq_a"],
    f"{LAYER}.self_attn.kv_proj.input_quantizer": ["layers.3.attn.wkv"],
    f"{LAYER}.self_attn.o_b_proj.input_quantizer": ["layers.3.attn.wo_b"],
    f"{LAYER}.mlp.shared_experts.up_proj.input_quantizer": ["layers.3.ffn.shared_experts.w3"],
    f"{LAYER}.self_attn.compressor.gate_proj.input_quantizer": ["layers.3.attn.compressor.wgate"],
    f"{LAYER}.self_attn.compressor.indexer.q_b_proj.input_quantizer": [
        "layers.3.attn.indexer.wq_b"
    ],
    f"{LAYER}.self_attn.compressor.indexer.scorer.weights_proj.input_quantizer": [
        "layers.3.attn.indexer.weights_proj"
    ],
    f"{LAYER}.self_attn.compressor.indexer.weights_proj.input_quantizer": [  # transformers 5.9
        "layers.3.attn.indexer.weights_proj"
    ],
    f"{LAYER}.mlp.experts.gate_up_proj_input_quantizer": [
        "layers.3.ffn.experts.0.w1", "layers.3.ffn.experts.17.w1", "layers.3.ffn.experts.17.w3",
    ],
    f"{LAYER}.mlp.experts.down_proj_input_quantizer": ["layers.3.ffn.experts.383.w2"],
    # per expert
    f"{LAYER}.mlp.experts.down_proj_input_quantizers.17": ["layers.3.ffn.experts.17.w2"],
    f"{LAYER}.mlp.experts.gate_proj_input_quantizers.17": ["layers.3.ffn.experts.17.w1"],
    f"{LAYER}.mlp.experts.17.up_proj.input_quantizer": ["layers.3.ffn.experts.17.w3"],
    f"{LAYER}.mlp.experts.17.w2.input_quantizer": ["layers.3.ffn.experts.17.w2"],
    # the other schemes
    "layers.3.attn.wq_a.input_quantizer": ["layers.3.attn.wq_a"],
    "model.layers.3.attn.wo_b.input_quantizer": ["layers.3.attn.wo_b"],
    "mtp.0.ffn.shared_experts.w1.input_quantizer": ["mtp.0.ffn.shared_experts.w1"],
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_spelling_leads_to_the_official_module(
    name: str, metadata: dict[str, str], tmp_path: Path
) -> None:
    from_names(metadata, {name: 5.5}).save(tmp_path / "amax.safetensors")
    loaded = Snapshot.load(tmp_path / "amax.safetensors")
    assert [loaded.input_amax(module) for module in NAMES[name]] == [5.5] * len(NAMES[name])
    assert loaded.input_amax("layers.4.attn.wq_a") is None
    assert loaded.input_amax("layers.3.ffn.experts.16.w2") == (
        5.5 if name.endswith("down_proj_input_quantizer") else None
    )


def test_only_input_quantizers_answer(metadata: dict[str, str]) -> None:
    others = (
        "self_attn.q_a_proj.weight_quantizer", "self_attn.q_a_proj.output_quantizer",
        "self_attn.k_bmm_quantizer", "mlp.experts.gate_up_proj_weight_quantizers.17",
    )  # fmt: skip
    found = from_names(metadata, {f"{LAYER}.{name}": 1.0 for name in others})
    for module in ("attn.wq_a", "attn.wkv", "ffn.experts.17.w1", "ffn.experts.17.w3"):
        assert found.input_amax(f"layers.3.{module}") is None


def test_an_expert_of_its_own_goes_before_the_shared_quantizer(metadata: dict[str, str]) -> None:
    found = from_names(
        metadata,
        {
            f"{LAYER}.mlp.experts.down_proj_input_quantizer": 2.0,
            f"{LAYER}.mlp.experts.down_proj_input_quantizers.4": 3.0,
        },
    )
    assert found.input_amax("layers.3.ffn.experts.4.w2") == 3.0
    assert found.input_amax("layers.3.ffn.experts.5.w2") == 2.0


@pytest.mark.parametrize(
    ("amax", "expected"),
    [
        (5.5, 5.5),
        (2.0**-126, 2.0**-126),
        (0.0, None),
        (-1.0, None),
        (math.nan, None),
        (math.inf, None),
        ([], None),
        ([0.0, 3.0, 1.0], 3.0),
        ([1.0, math.nan], None),
        ([[1.0, math.inf]], None),
    ],
    ids=str,
)
def test_input_amax_is_finite_and_positive_or_none(
    amax: object, expected: float | None, metadata: dict[str, str], tmp_path: Path
) -> None:
    name = f"{LAYER}.self_attn.q_a_proj.input_quantizer"
    from_names(metadata, {name: amax}).save(tmp_path / "amax.safetensors")
    assert Snapshot.load(tmp_path / "amax.safetensors").input_amax("layers.3.attn.wq_a") == expected


def test_is_a_safetensors_file_that_others_read(metadata: dict[str, str], tmp_path: Path) -> None:
    names = {f"{LAYER}.self_attn.{p}_proj.input_quantizer": float(i) for i, p in enumerate("ab", 1)}
    names = {name.replace(".a_", ".q_a_").replace(".b_", ".q_b_"): v for name, v in names.items()}
    path = tmp_path / "amax.safetensors"
    from_names(metadata, names).save(path)
    with safe_open(path, "pt") as file:
        assert {name: file.get_tensor(name).item() for name in file.keys()} == names  # noqa: SIM118
        assert file.metadata()["complete"] == "true"
        assert json.loads(file.metadata()["quantizers"]).keys() == names.keys()


def test_the_same_content_gives_the_same_bytes(metadata: dict[str, str], tmp_path: Path) -> None:
    names = {f"{LAYER}.mlp.experts.gate_up_proj_weight_quantizers.{e}": float(e) for e in range(9)}
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    backwards = dict(reversed(names.items()))
    from_names(metadata, names).save(paths[0])
    found = from_names(metadata, backwards)
    Snapshot(found.amax, {**found.metadata, "quantizers": from_names(metadata, names).metadata["quantizers"]}).save(paths[1])  # noqa: E501  # fmt: skip
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_refused_on_saving_leaves_what_was_there(metadata: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "amax.safetensors"
    path.write_text("older")
    del metadata["dataset"]
    with pytest.raises(SnapshotError, match="the metadata lacks dataset"):
        snapshot(metadata).save(path)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "pt"}, "its format is 'pt', expected 'dsv4-amax-snapshot'"),
        ({"version": "2"}, "snapshot version '2'; this release reads '1'"),
        ({"torch": None}, "the metadata lacks torch"),
        ({"complete": "yes"}, "complete is 'yes', expected 'true' or 'false'"),
        ({"quantizers": "[1]"}, "quantizers is no JSON object of objects"),
        ({"quantizers": "{"}, "quantizers is no JSON object of objects"),
        ({"quantizers": "{}"}, r"wq_a.input_quantizer: shape \[\], but the metadata says nothing"),
        ({"unseen_experts": "[3]"}, "unseen_experts is no JSON list of names"),
    ],
)
def test_wrong_metadata_is_refused_by_name(
    change: dict[str, str | None], message: str, metadata: dict[str, str], tmp_path: Path
) -> None:
    name = "layers.0.attn.wq_a.input_quantizer"
    right = {**metadata, "quantizers": json.dumps({name: {"shape": []}})}
    wrong = {key: value for key, value in {**right, **change}.items() if value is not None}
    save_file({name: torch.ones(())}, tmp_path / "amax.safetensors", wrong)
    with pytest.raises(SnapshotError, match=f"file {tmp_path}/amax.safetensors.*{message}"):
        Snapshot.load(tmp_path / "amax.safetensors")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"layers.0.attn.wq_a.input_quantizer": torch.ones((), dtype=torch.bfloat16)}, "BF16"),
        ({"layers.0.attn.wq_a.input_quantizer": torch.ones(2)}, r"shape \[2\], .* says \[\]"),
        ({"vision.0.proj.input_quantizer": torch.ones(())}, "none of DeepSeek-V4's"),
        ({"layers.007.attn.wq_a.input_quantizer": torch.ones(())}, "none of DeepSeek-V4's"),
        ({}, "1 quantizers of the metadata have no amax"),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    tensors: dict[str, torch.Tensor], message: str, metadata: dict[str, str], tmp_path: Path
) -> None:
    names = list(tensors) or ["layers.0.attn.wq_a.input_quantizer"]
    about: dict[str, object] = {name: {"shape": []} for name in names}
    path = tmp_path / "amax.safetensors"
    save_file(tensors, path, {**metadata, "quantizers": json.dumps(about)})
    with pytest.raises(SnapshotError, match=message) as refusal:
        Snapshot.load(path)
    assert names[0] in str(refusal.value)


def test_two_quantizers_for_one_input_are_refused(metadata: dict[str, str], tmp_path: Path) -> None:
    names = ("layers.0.attn.wq_a", "model.layers.0.self_attn.q_a_proj")
    found = from_names(metadata, {f"{name}.input_quantizer": 1.0 for name in names})
    with pytest.raises(SnapshotError, match="claims the input of layers.0.attn.wq_a as well"):
        found.save(tmp_path / "amax.safetensors")


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content, message in ((b"", "0 bytes long"), (b"\x80\x04K\x01.", "bytes long")):
        (tmp_path / "amax.safetensors").write_bytes(content)  # the second is a pickle
        with pytest.raises(SnapshotError, match=f"^file {tmp_path}/amax.safetensors: .*{message}"):
            Snapshot.load(tmp_path / "amax.safetensors")
    with pytest.raises(SnapshotError, match="a folder; give the snapshot file"):
        Snapshot.load(tmp_path)
    with pytest.raises(SnapshotError, match=f"^file {tmp_path}/absent.safetensors: does not exist"):
        Snapshot.load(tmp_path / "absent.safetensors")


def test_the_config_hash_is_of_the_model_not_of_its_storage(official: Path, bf16: Path) -> None:
    mixed, plain = (json.loads((folder / "config.json").read_text()) for folder in (official, bf16))
    assert "quantization_config" in mixed
    assert "quantization_config" not in plain
    assert config_sha256(mixed) == config_sha256(plain)
    assert config_sha256({**mixed, "hidden_size": 512}) != config_sha256(mixed)
    assert config_sha256(dict(reversed(mixed.items()))) == config_sha256(mixed)
