"""Big checkpoints: tasks over processes, and the headers of the whole Pro model in seconds."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from modelopt_v4_patches.executor import Executor, LocalProcesses
from modelopt_v4_patches.validate import examine
from nvfp4_codec.checkpoint.deepseek_v4 import values

T = TypeVar("T")
R = TypeVar("R")
W3 = "layers.1.ffn.experts.3.w3.weight_scale_2"


class Elsewhere:
    """Everything through pickle and in another order, as workers elsewhere would have it."""

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        for item in reversed(items):
            there: T = pickle.loads(pickle.dumps(item))
            yield pickle.loads(pickle.dumps(function(there)))


@pytest.mark.parametrize(
    "executor", [Elsewhere(), pytest.param(LocalProcesses(2), marks=pytest.mark.full)]
)
def test_workers_find_what_one_process_finds(
    healthy, write, tiny, tmp_path, monkeypatch, executor: Executor
):
    content = replace(healthy["full"], tensors=dict(healthy["full"].tensors))
    content.tensors[W3] = content.tensors[W3] * 0.5
    folder = write(content, tmp_path / "c", shards=4)
    monkeypatch.setattr(values, "_TASK_BYTES", 1 << 20)
    alone = examine(folder, against=tiny, sample="all")
    spread = examine(folder, against=tiny, sample="all", executor=executor)
    assert {f.code for f in alone.findings} == {"fused-scale-mismatch", "constant-factor"}
    assert spread == alone


def test_tasks_are_bounded_and_cover_everything_once(healthy, write, tmp_path, monkeypatch):
    from nvfp4_codec.checkpoint.deepseek_v4.stored import Model

    monkeypatch.setattr(values, "_TASK_BYTES", 1 << 19)
    with Model.open(write(healthy["full"], tmp_path / "c", shards=2)) as model:
        tasks = list(values.plan(model, None, set(model.tensors), {}))
        names = [w.name for task in tasks for unit in task.units for w in unit.weights]
        assert sorted(names) == sorted(model.tensors)
        assert len(tasks) > 10
        total = sum(info.nbytes for info in model.checkpoint)
        assert sum(task.nbytes for task in tasks) == total
        largest = max(stored.nbytes for stored in model.tensors.values())
        # a task ends with the unit that fills it, here of at most two tensors
        assert max(task.nbytes for task in tasks) < (1 << 19) + 2 * largest


def pro_config() -> dict[str, object]:
    """The structure of DeepSeek-V4-Pro; sizes of what is not counted here are made up."""
    config: dict[str, object] = json.loads(
        (Path(__file__).parents[4] / "tests/assets/tiny-dsv4/config.json").read_text()
    )
    ratios = [128, 128] + [4, 128] * 29 + [4, 0]
    return config | {
        "num_hidden_layers": 61, "n_routed_experts": 384, "hidden_size": 7168,
        "moe_intermediate_size": 3072, "compress_ratios": ratios, "num_hash_layers": 3,
        "vocab_size": 129280, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
        "o_lora_rank": 1024, "index_n_heads": 64,
    }  # fmt: skip


@pytest.mark.full
def test_headers_of_the_whole_pro_model_take_seconds(healthy, tmp_path):
    """Sparse files: 289,000 tensors of 900 GB, of which nothing but the headers is there."""
    from nvfp4_codec.checkpoint.header import TensorSpec, build_header
    from nvfp4_codec.schemas.deepseek_v4 import Entry, Layout, ModelConfig, Schema

    config = pro_config()
    config["quantization_config"] = healthy["experts"].quantization | {
        "quantized_layers": {
            f"{block}.ffn.experts": {"quant_algo": "NVFP4"}
            for block in [*(f"layers.{i}" for i in range(61)), "mtp.0"]
        }
    }
    schema = Schema(ModelConfig.from_dict(config))

    def layout(entry: Entry) -> Layout:
        return "nvfp4" if entry.role == "routed_expert" else "official"

    specs = [TensorSpec(*spec) for spec in schema.tensors(layout)]
    shards, weight_map = 64, {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = tuple(specs[i::shards])
        made = build_header(part, {"format": "pt"})
        with (tmp_path / file).open("wb") as stream:
            stream.write(made.header)
            stream.truncate(made.size)
        weight_map |= dict.fromkeys((spec.name for spec in part), file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, text in healthy["experts"].files.items():
        (tmp_path / name).write_text(text)
    started = time.process_time()
    made = examine(tmp_path, sample=0)
    seconds = time.process_time() - started
    assert made.findings == ()
    assert len(specs) > 280_000
    assert sum(row.tensors for row in made.rows) == len(list(schema.entries()))
    assert seconds < 60  # measured: 14
