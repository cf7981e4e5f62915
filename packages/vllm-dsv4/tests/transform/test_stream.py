"""The pass as a stream: order, what is absent, what is left out, what waits, what is refused."""

from __future__ import annotations

import logging
import random
import shutil
from dataclasses import replace

import pytest
import torch

from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import Schema, from_official
from vllm_dsv4.options import Options
from vllm_dsv4.stored import promised, read_stored
from vllm_dsv4.transform import Transform

SCHEMES = ("official", "hf", "half_converted")


def by_seed(seed):
    def order(names):
        shuffled = sorted(names)
        random.Random(seed).shuffle(shuffled)
        return shuffled

    return order


def weights_last(names):
    return sorted(names, key=lambda name: (name.endswith(".weight"), name))


def weights_first(names):
    return sorted(names, key=lambda name: (not name.endswith(".weight"), name))


@pytest.mark.parametrize("order", [by_seed(1), by_seed(2), weights_last, weights_first])
def test_order_does_not_matter(run, oracle, order):
    usual, other = run("two-scales"), run("two-scales", order=order)
    assert usual.out.keys() == other.out.keys()
    assert len(other.yielded) == len(other.out)
    assert not [n for n in usual.out if not oracle.same(usual.out[n], other.out[n])]
    assert usual.report.layers == other.report.layers
    assert not other.report.dropped
    assert usual.report.requantized == other.report.requantized


def test_shards_that_tear_families_apart(checkpoint, checkpoints, oracle, run, tmp_path):
    from safetensors import safe_open

    folder = checkpoints.split(shutil.copytree(checkpoint("two-scales", "hf"), tmp_path / "torn"))

    def stream():
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118
                    yield name, shard.get_tensor(name)

    out = dict(Transform(read_stored(folder), Options()).apply(stream()))
    expected = run("two-scales").out
    assert out.keys() == expected.keys()
    assert not [n for n in out if not oracle.same(out[n], expected[n])]


def test_the_source_is_never_written_to(checkpoint, checkpoints, oracle):
    folder = checkpoint("two-scales")
    source = checkpoints.read(folder)
    before = {name: tensor.clone() for name, tensor in source.items()}
    transform = Transform(read_stored(folder), Options(attn_dtype="fp8"), shared_tp=2)
    for _, tensor in transform.apply(source.items()):
        del tensor
    assert not [name for name in source if not oracle.same(source[name], before[name])]


def test_at_most_one_layer_waits(checkpoint, checkpoints):
    """In the order of a checkpoint nothing of a finished block is held back."""
    folder = checkpoint("two-scales")
    source = checkpoints.read(folder)
    blocks = sorted({".".join(name.split(".")[:2]) for name in source if name[0] in "lm"})
    ordered = [(n, source[n]) for b in blocks for n in sorted(source) if n.startswith(f"{b}.")]
    fed: list[str] = []

    def stream():
        for name, tensor in ordered:
            fed.append(name)
            yield name, tensor

    blocks_open = 0
    for name, _ in Transform(read_stored(folder), Options()).apply(stream()):
        here, now = (".".join(n.split(".")[:2]) for n in (name, fed[-1]))
        blocks_open += here != now
    assert len(fed) == len(ordered) > 1000
    assert blocks_open == 0


class TestParts:
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_model_and_mtp_share_the_stream(self, run, scheme):
        both, model, mtp = (run("full", scheme, part=p) for p in ("all", "model", "mtp"))
        assert model.out.keys() | mtp.out.keys() == both.out.keys()
        assert not model.out.keys() & mtp.out.keys()
        assert mtp.out
        assert all(name.startswith("mtp.") for name in mtp.out)
        assert not any(path.startswith("mtp") for path, *_ in model.report.layers)

    def test_mtp_that_is_wanted_and_absent(self, run, checkpoint):
        with pytest.raises(CheckpointError, match="no MTP blocks, which speculative decoding"):
            run("no-mtp", part="mtp")
        assert run("no-mtp", part="model").out.keys() == run("no-mtp").out.keys()

    def test_a_broken_mtp_block_does_not_stop_the_model(self, run, checkpoint):
        stored = replace(run("full").stored, missing=("mtp.0.e_proj.scale",))
        source = {n: t for n, t in run("full").source.items() if n != "mtp.0.e_proj.scale"}
        assert dict(Transform(stored, Options(), part="model").apply(source.items()))
        for part in ("all", "mtp"):
            with pytest.raises(CheckpointError, match=r"mtp.0.e_proj.scale.*1 tensors are missing"):
                list(Transform(stored, Options(), part=part).apply(source.items()))


class TestExpertParallelism:
    """vLLM's loader leaves out the weights of other ranks' experts, but sends all their scales."""

    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize("variant", ["full", "two-scales"])
    @pytest.mark.parametrize("order", [sorted, weights_last, weights_first])
    def test_weights_of_other_ranks_may_be_absent(self, run, oracle, variant, scheme, order):
        whole = run(variant, scheme)

        def is_local(name):
            return ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) < 4

        names = [n for n in order(whole.source) if is_local(n) or not n.endswith(".weight")]
        assert len(names) < len(whole.source)
        transform = Transform(whole.stored, Options())
        out = dict(transform.apply((n, whole.source[n]) for n in names))
        absent = whole.out.keys() - out.keys()
        assert len(absent) == 5 * 12 * 3
        assert all(".experts." in name and name.endswith(".weight") for name in absent)
        assert not [n for n in out if not oracle.same(out[n], whole.out[n])]

    def test_scales_may_not_be_absent(self, run):
        whole = run("full")
        lost = "layers.1.ffn.experts.3.w3.weight_scale"
        stream = [(n, t) for n, t in whole.source.items() if n != lost]
        with pytest.raises(CheckpointError, match=f"{lost}.*1 tensors came"):
            list(Transform(whole.stored, Options()).apply(stream))


class TestAbsentTensors:
    def test_what_the_headers_miss_is_refused_before_anything(self, run):
        stored = replace(run("full").stored, missing=("a.b", "c.d", "e.f", "g.h"))
        stream = iter([("layers.0.attn.wq_a.weight", torch.zeros(1))])
        with pytest.raises(
            CheckpointError, match=r"4 tensors are missing: a.b, c.d, e.f and 1 more"
        ):
            list(Transform(stored, Options()).apply(stream))
        assert list(stream)

    @pytest.mark.parametrize(
        "lost",
        [
            "layers.1.attn.wq_b.weight_scale",            # NVFP4 that stays
            "layers.1.attn.wq_b.weight",
            "layers.1.attn.wkv.input_scale",              # of a fused pair
            "layers.1.attn.compressor.wkv.weight_scale_2",  # converted to BF16
            "layers.1.attn.wo_a.weight",                  # converted to FP8
            "mtp.0.e_proj.scale",                         # FP8 that stays
            "layers.1.ffn.experts.3.w2.input_scale",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_what_the_stream_leaves_out_is_named(self, run, scheme, lost):
        whole = run("all-nvfp4", scheme)
        written = from_official(lost, scheme)
        stream = [(n, t) for n, t in whole.source.items() if n != written]
        assert len(stream) == len(whole.source) - 1
        with pytest.raises(CheckpointError, match=f"ended before 1 tensors came: {lost}") as caught:
            list(Transform(whole.stored, Options()).apply(stream))
        assert caught.value.tensor == lost


class TestLeftOut:
    def test_unknown_tensors_give_one_warning(self, run, checkpoint, checkpoints, tmp_path, caplog):
        folder = shutil.copytree(checkpoint("full", "hf"), tmp_path / "copy")
        extra = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(4)]
        extra += ["model.layers.0.self_attn.compressor.position_bias", "vision.proj.weight"]
        checkpoints.change(folder, lambda t: t.update({n: torch.zeros(2) for n in extra}))
        stored = read_stored(folder)
        assert set(stored.unknown) == set(extra)
        transform = Transform(stored, Options())
        with caplog.at_level(logging.DEBUG, logger="vllm_dsv4"):
            out = dict(transform.apply(checkpoints.read(folder).items()))
        assert out.keys() == run("full").out.keys()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "6 tensors" in caplog.text
        assert "4 x model.layers.#.self_attn.rotary_emb.inv_freq" in caplog.text
        assert transform.report.dropped == {
            "model.layers.#.self_attn.rotary_emb.inv_freq": 4,
            "model.layers.#.self_attn.compressor.position_bias": 1,
            "vision.proj.weight": 1,
        }

    @pytest.mark.parametrize(("count", "more"), [(10, ""), (12, " and 2 more kinds")])
    def test_the_warning_names_ten_kinds_the_most_frequent_first(self, run, caplog, count, more):
        whole = run("full")
        names = [f"odd.kind{chr(97 + i)}" for i in range(count)]
        stray = dict.fromkeys([*names, "odd.7", "odd.10", "odd.512"], torch.zeros(2))
        del stray[names[0]]  # `count` kinds, the numbers being one
        with caplog.at_level(logging.WARNING, logger="vllm_dsv4"):
            list(Transform(whole.stored, Options()).apply((whole.source | stray).items()))
        (message,) = (record.getMessage() for record in caplog.records)
        listed = message.split("left out: ")[1].removesuffix(more)
        assert listed.split(", ") == ["3 x odd.#", *(f"1 x {name}" for name in names[1:10])]
        assert message.endswith(more or names[-1])

    def test_only_indices_are_left_out_of_a_kind(self, run):
        whole = run("full")
        source = {**whole.source, "vision.3x.12.block2.7": torch.zeros(2)}
        transform = Transform(whole.stored, Options())
        list(transform.apply(source.items()))
        assert transform.report.dropped == {"vision.3x.#.block2.#": 1}

    def test_nothing_unknown_nothing_said(self, checkpoint, checkpoints, caplog):
        folder = checkpoint("full")
        with caplog.at_level(logging.DEBUG, logger="vllm_dsv4"):
            list(Transform(read_stored(folder), Options()).apply(checkpoints.read(folder).items()))
        assert not caplog.records

    def test_kv_cache_scales_are_left_out(self, run):
        whole = run("full", "hf")
        source = {**whole.source, "model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}
        transform = Transform(whole.stored, Options())
        assert dict(transform.apply(source.items())).keys() == whole.out.keys()
        assert list(transform.report.dropped) == ["model.layers.#.self_attn.k_proj.k_scale"]

    def test_a_second_spelling_is_left_out(self, checkpoint, checkpoints, tmp_path, run):
        folder = shutil.copytree(checkpoint("full", "half_converted"), tmp_path / "copy")
        checkpoints.change(folder, lambda t: t.update({"lm_head.weight": t["head.weight"].clone()}))
        source = checkpoints.read(folder)
        transform = Transform(read_stored(folder), Options())
        yielded = [name for name, _ in transform.apply(source.items())]
        assert sorted(yielded) == sorted(run("full").out)

    def test_a_second_spelling_of_what_is_no_linear(self, checkpoint, checkpoints, tmp_path, run):
        folder = shutil.copytree(checkpoint("full", "half_converted"), tmp_path / "copy")
        norm = "model.layers.1.attn.{}.weight".format
        checkpoints.change(folder, lambda t: t.update({norm("kv_norm"): t[norm("norm")].clone()}))
        stored = read_stored(folder)
        assert len(stored.unknown) == 1
        transform = Transform(stored, Options())
        yielded = [name for name, _ in transform.apply(checkpoints.read(folder).items())]
        assert sorted(yielded) == sorted(run("full").out)

    def test_a_second_spelling_where_no_header_was_looked_at(self, run):
        whole = run("full", "half_converted")
        source = {**whole.source, "lm_head.weight": whole.source["head.weight"]}
        transform = Transform(whole.stored, Options())
        assert sorted(name for name, _ in transform.apply(source.items())) == sorted(whole.out)
        assert transform.report.dropped == {"lm_head.weight": 1}

    def test_block_scales_under_transformers_name(self, run, oracle):
        whole = run("full")
        source = {n.replace("_proj.scale", "_proj.weight_scale_inv"): t
                  for n, t in whole.source.items()}  # fmt: skip
        assert source.keys() != whole.source.keys()
        out = dict(Transform(whole.stored, Options()).apply(source.items()))
        assert out.keys() == whole.out.keys()
        assert oracle.same(out["mtp.0.e_proj.scale"], whole.out["mtp.0.e_proj.scale"])

    @pytest.mark.parametrize("expert", ["16", "1000", "03", "x", ""])
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_experts_that_the_model_does_not_have(self, run, scheme, expert):
        """Also where no header was looked at, and in the middle of those that it has."""
        whole = run("full", scheme)
        module = from_official("layers.1.ffn.experts.3.w1", scheme).replace(".3.", f".{expert}.")
        transform = Transform(whole.stored, Options())
        stray = {f"{module}.weight": torch.zeros(128, 128).byte(), f"{module}.input_scale":
                 torch.ones(())}  # fmt: skip
        names = [*sorted(whole.source), *stray]
        out = dict(transform.apply((n, (whole.source | stray)[n]) for n in names))
        assert out.keys() == whole.out.keys()
        assert sum(transform.report.dropped.values()) == 2

    def test_scales_beside_an_unquantized_weight_are_left_out(self, run):
        whole = run("full")
        stray = {"layers.1.ffn.gate.input_scale": torch.ones(()),
                 "layers.1.attn.wo_a.weight_scale_2": torch.ones(())}  # fmt: skip
        transform = Transform(whole.stored, Options())
        out = dict(transform.apply((whole.source | stray).items()))
        assert out.keys() == whole.out.keys()
        assert sum(transform.report.dropped.values()) == 2


class TestHalfQuantized:
    """One of a fused pair stored as FP8, the other as NVFP4."""

    MODULE = "layers.1.attn.wkv"

    @pytest.fixture
    def halved(self, run):
        whole, experts = run("full"), run("experts")
        parts = ("weight_scale", "weight_scale_2", "input_scale", "weight")
        source = {n: t for n, t in whole.source.items()
                  if n not in [f"{self.MODULE}.{part}" for part in parts]}  # fmt: skip
        source |= {n: t for n, t in experts.source.items() if n.startswith(f"{self.MODULE}.")}
        formats = {**whole.stored.formats, self.MODULE: "fp8_block"}
        return source, replace(whole.stored, formats=formats)

    def test_both_run_in_bf16(self, halved, oracle, run):
        source, stored = halved
        out = dict(Transform(stored, Options()).apply(source.items()))
        for module in (self.MODULE, "layers.1.attn.wq_a"):
            expected = oracle.values(source, module).float().bfloat16()
            assert torch.equal(out[f"{module}.weight"], expected)
            assert not [n for n in out if n.startswith(f"{module}.") and "scale" in n]

    def test_one_warning_says_so(self, halved, caplog):
        _, stored = halved
        with caplog.at_level(logging.WARNING, logger="vllm_dsv4"):
            Transform(stored, Options(), part="mtp")
            assert not caplog.records
            Transform(stored, Options(), part="model")
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "2 linears are fused" in caplog.text
        assert self.MODULE in caplog.text


class TestPromised:
    def test_a_config_that_tells_the_truth_is_enough(self, checkpoint, run, oracle):
        import json

        folder = checkpoint("all-nvfp4", "hf")
        said = promised(json.loads((folder / "config.json").read_text()))
        whole = run("all-nvfp4", "hf")
        out = dict(Transform(said, Options()).apply(whole.source.items()))
        assert out.keys() == whole.out.keys()
        assert not [n for n in out if not oracle.same(out[n], whole.out[n])]

    @pytest.mark.parametrize(
        ("module", "said"), [("layers.1.attn.wq_b", "fp8_block"), ("layers.1.attn.wo_a", "nvfp4"),
                             ("layers.1.ffn.gate", "nvfp4"), ("layers.1.attn.wq_a", "bf16")],
    )  # fmt: skip
    def test_one_that_does_not_is_refused_by_name(self, run, module, said):
        whole = run("full")
        stored = replace(whole.stored, formats={**whole.stored.formats, module: said})
        with pytest.raises(CheckpointError, match=f"{module}.weight.*stored as {said}"):
            list(Transform(stored, Options()).apply(whole.source.items()))


class TestDamaged:
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("layers.1.attn.wkv.weight_scale_2", torch.tensor(0.0), "layers.1.attn.wkv is 0;"),
            ("layers.1.ffn.experts.3.w1.weight_scale_2", torch.tensor(float("nan")), "w1 is nan"),
            ("layers.1.attn.wo_a.weight_scale_2", torch.tensor(-1.0), "wo_a.*positive number"),
            ("layers.1.attn.wo_a.weight_scale", torch.zeros(2, 2).to(torch.float8_e4m3fn),
             "wo_a.*shape"),
            ("layers.1.attn.compressor.wkv.weight_scale", torch.zeros(512, 16), "wkv.*float32"),
            ("mtp.0.attn.wo_b.scale", torch.zeros(3, 3), r"wo_b.*\[3, 3\].*\[2, 2\]"),
            ("mtp.0.attn.wo_b.scale", torch.zeros(2, 3).to(torch.float8_e8m0fnu),
             r"wo_b.*\[2, 3\].*\[2, 2\]"),
        ],
    )  # fmt: skip
    def test_errors_name_the_tensor(self, run, name, value, message):
        whole = run("all-nvfp4")
        source = {**whole.source, name: value}
        with pytest.raises(CheckpointError, match=message) as caught:
            list(Transform(whole.stored, Options()).apply(source.items()))
        assert name.rpartition(".")[0].rpartition(".")[0] in str(caught.value.tensor)


class TestPadding:
    """The tiny model's shared experts are 128 wide: one block, which two ranks cannot share."""

    @pytest.mark.parametrize("tp", [2, 8])
    @pytest.mark.parametrize("dtype", ["stored", "fp8", "bf16"])
    @pytest.mark.parametrize("block", ["layers.1", "mtp.0"])
    def test_every_rank_gets_whole_blocks(self, run, oracle, tp, dtype, block):
        plain = run("full", shared_dtype=dtype)
        wide = run("full", shared_dtype=dtype, shared_tp=tp)
        assert wide.out.keys() == plain.out.keys()
        inner = 128 * tp
        for leaf, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
            module = f"{block}.ffn.shared_experts.{leaf}"
            before, after = oracle.values(plain.out, module), oracle.values(wide.out, module)
            assert after.shape[dim] == inner
            assert torch.equal(after.narrow(dim, 0, 128), before)
            assert not after.narrow(dim, 128, inner - 128).any()
            assert bool(torch.isfinite(after).all())
            for part in ("weight_scale_2", "input_scale"):
                if f"{module}.{part}" in plain.out:
                    found = wide.out[f"{module}.{part}"]
                    assert oracle.same(found, plain.out[f"{module}.{part}"])
            for part in ("weight", "weight_scale", "scale"):
                if f"{module}.{part}" in plain.out:
                    assert wide.out[f"{module}.{part}"].shape[dim] % tp == 0
            if f"{module}.scale" in wide.out:
                blocks = wide.out[f"{module}.scale"].narrow(dim, 1, tp - 1)
                assert bool((blocks.view(torch.uint8) == 127).all())  # one, as E8M0; never NaN
        assert wide.report.padded > 0

    def test_nothing_else_is_widened(self, run, oracle):
        plain, wide = run("full"), run("full", shared_tp=2)
        others = [n for n in plain.out if ".shared_experts." not in n]
        assert len(others) > 1000
        assert not [n for n in others if not oracle.same(plain.out[n], wide.out[n])]

    @pytest.mark.parametrize("dtype", ["stored", "bf16"])
    def test_what_was_widened_is_counted(self, run, dtype):
        """Weights and block scales: of four main blocks as NVFP4 or BF16, of the MTP's as FP8."""
        mtp = 3 if dtype == "bf16" else 6
        main = 12 if dtype == "bf16" else 24
        assert run("full", shared_dtype=dtype, shared_tp=2).report.padded == main + mtp

    def test_one_rank_needs_no_whole_blocks(self, run, oracle):
        """Where shared experts are replicated, 192 rows stay 192."""
        whole = run("full")
        config = whole.stored.schema.config
        narrow = replace(config, dimensions={**config.dimensions, "inner": 192})
        stored = replace(whole.stored, schema=Schema(narrow))
        out = dict(Transform(stored, Options()).apply(whole.source.items()))
        assert not [n for n in whole.out if not oracle.same(out[n], whole.out[n])]

    def test_one_rank_changes_nothing(self, run):
        assert run("full").report.padded == 0
        assert run("full").out["layers.1.ffn.shared_experts.w1.weight"].shape == (128, 128)


class TestReport:
    def test_layers_by_path_and_format(self, run):
        layers = run("all-nvfp4").report.layers
        assert layers["layers.*.attn.wo_a", "nvfp4", "fp8_block"] == 4
        assert layers["layers.*.attn.compressor.wkv", "nvfp4", "bf16"] == 3
        assert layers["layers.*.attn.indexer.compressor.wgate", "nvfp4", "bf16"] == 1
        assert layers["layers.*.ffn.experts", "nvfp4", "nvfp4"] == 4
        assert layers["mtp.*.ffn.experts", "nvfp4", "nvfp4"] == 1
        assert layers["mtp.*.attn.wq_a", "fp8_block", "fp8_block"] == 1
        assert sum(layers.values()) == len(run("all-nvfp4").stored.formats)

    def test_the_table_says_it(self, run):
        lines = run("two-scales").report.table().splitlines()
        assert lines[0].split() == ["path", "layers", "stored", "runs", "as"]
        assert len(lines) == 1 + len(run("two-scales").report.layers)
        (wo_a,) = [line for line in lines if line.startswith("layers.*.attn.wo_a")]
        assert wo_a.split()[1:4] == ["4", "nvfp4", "fp8_block"]
        assert "worst SQNR" in wo_a
        (experts,) = [line for line in lines if line.startswith("layers.*.ffn.experts")]
        assert "64 fused groups had two weight_scale_2" in experts
        assert "blocks rounded by up to" in experts

    def test_a_vanishing_block_is_counted(self, run):
        whole = run("full")
        ours = "layers.1.attn.wkv"
        scale = whole.source[f"{ours}.weight_scale"].clone()
        scale[0, 0] = 2.0**-9
        smaller = whole.source[f"{ours}.weight_scale_2"] * 0.25
        changed = {f"{ours}.weight_scale": scale, f"{ours}.weight_scale_2": smaller}
        source = {**whole.source, **changed}
        transform = Transform(whole.stored, Options())
        out = dict(transform.apply(source.items()))
        assert transform.report.unified["layers.*.attn.wq_a"].vanished_blocks == 1
        assert float(out[f"{ours}.weight_scale"][0, 0]) == 0
        assert "1 vanished" in transform.report.table()
