"""Every tensor after the pass, compared with torch formulas on the tensors before it."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import pytest
import torch

from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import fused_with
from vllm_dsv4.options import Options
from vllm_dsv4.stored import read_stored
from vllm_dsv4.transform import Transform
from vllm_dsv4.transform.values import fp8_scale, to_bf16, to_fp8

SCHEMES = ("official", "hf", "half_converted")
SCALES = ("weight_scale", "weight_scale_2", "input_scale")


def linear_modules(out):
    return sorted({n.removesuffix(".weight") for n in out if n.endswith(".weight")})


def assert_true_block_scales(weight, scale, expected):
    """Each block's scale is the smallest power of two that holds its largest value in E4M3."""
    assert weight.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float8_e8m0fnu
    rows, columns = expected.shape
    for i in range(0, rows, 128):
        for j in range(0, columns, 128):
            amax = float(expected[i : i + 128, j : j + 128].abs().max())
            byte = int(scale[i // 128, j // 128].view(torch.uint8))
            assert byte - 127 == math.ceil(math.log2(amax / 448))


def assert_nearest_e4m3(found, expected, scale, tolerance=0.0):
    """No value is further off than half a step of E4M3 at its scale.

    tolerance: relative, for sources that were rounded to float32 on the way.
    """
    wide = (2.0 ** (scale.view(torch.uint8).double() - 127)).repeat_interleave(128, 0)
    wide = wide.repeat_interleave(128, 1)[: expected.shape[0], : expected.shape[1]]
    exponent = torch.floor(torch.log2((expected.abs() / wide).clamp(min=2.0**-6)))
    half_step = 2.0 ** (exponent - 4) * wide
    assert bool(((found - expected).abs() <= half_step + tolerance * expected.abs()).all())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("variant", ["full", "experts"])
def test_what_needs_nothing_leaves_byte_for_byte(run, oracle, checkpoints, checkpoint, variant,
                                                 scheme):  # fmt: skip
    official = checkpoints.read(checkpoint(variant))
    done = run(variant, scheme)
    assert done.out.keys() == official.keys()
    assert len(done.yielded) == len(official)
    assert not [name for name in official if not oracle.same(done.out[name], official[name])]


@pytest.mark.parametrize("variant", ["full", "all-nvfp4", "two-scales", "mtp-bf16", "wo-a-bf16"])
@pytest.mark.parametrize("scheme", ["hf", "half_converted"])
def test_all_schemes_give_the_same_stream(run, oracle, variant, scheme):
    """The same names and bytes, whatever the order in which the schemes sort them."""
    official, other = run(variant, "official"), run(variant, scheme)
    assert len(official.yielded) == len(official.out)
    assert len(other.yielded) == len(other.out)
    assert official.out.keys() == other.out.keys()
    assert not [n for n in official.out if not oracle.same(official.out[n], other.out[n])]


def test_compressors_become_bf16(run, oracle):
    done = run("all-nvfp4")
    modules = [m for m in linear_modules(done.source) if ".compressor.w" in m]
    assert len(modules) == 8
    for module in modules:
        expected = oracle.values(done.source, module)
        found = done.out[f"{module}.weight"]
        assert found.dtype == torch.bfloat16
        # exact in float32 (2 + 4 + 24 bits, rounded once), then to nearest
        assert torch.equal(found, expected.float().bfloat16())
        assert not [n for n in done.out if n.startswith(module) and n != f"{module}.weight"]


def test_wo_a_becomes_fp8_with_true_block_scales(run, oracle):
    done = run("all-nvfp4")
    for layer in range(4):
        module = f"layers.{layer}.attn.wo_a"
        expected = oracle.values(done.source, module)
        weight, scale = done.out[f"{module}.weight"], done.out[f"{module}.scale"]
        assert_true_block_scales(weight, scale, expected)
        assert_nearest_e4m3(oracle.fp8(weight, scale), expected, scale, tolerance=2.0**-23)
        assert f"{module}.weight_scale" not in done.out
    requantized = done.report.requantized["layers.*.attn.wo_a"]
    assert requantized.linears == 4
    assert requantized.max_relative_error > 0


def test_bf16_wo_a_becomes_fp8_too(run, oracle):
    done = run("wo-a-bf16")
    for layer in range(4):
        module = f"layers.{layer}.attn.wo_a"
        expected = oracle.values(done.source, module)
        weight, scale = done.out[f"{module}.weight"], done.out[f"{module}.scale"]
        assert_true_block_scales(weight, scale, expected)
        assert_nearest_e4m3(oracle.fp8(weight, scale), expected, scale)
    # it came from FP8, by a power of two for each block: nothing is lost on the way back
    assert done.report.requantized["layers.*.attn.wo_a"].max_relative_error == 0


@pytest.mark.parametrize("variant", ["full", "all-nvfp4", "wo-a-bf16"])
def test_wo_a_as_bf16(run, oracle, variant):
    done = run(variant, wo_a_dtype="bf16")
    for module in [f"layers.{i}.attn.wo_a" for i in range(4)] + ["mtp.0.attn.wo_a"]:
        expected = oracle.values(done.source, module)
        assert torch.equal(done.out[f"{module}.weight"], expected.float().bfloat16())
        assert f"{module}.scale" not in done.out


ATTENTION = ("attn.wq_a", "attn.wkv", "attn.wq_b", "attn.wo_b")
SHARED = tuple(f"ffn.shared_experts.{w}" for w in ("w1", "w2", "w3"))


@pytest.mark.parametrize(
    ("option", "leaves"),
    [
        ("attn_dtype", ATTENTION),
        ("shared_dtype", SHARED),
        ("indexer_dtype", ("attn.indexer.wq_b",)),
    ],
)
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_options_convert_what_they_name(run, oracle, option, leaves, dtype):
    done, plain = run("full", **{option: dtype}), run("full")
    moved = {m for m in linear_modules(plain.out) if m.endswith(leaves)}
    assert moved
    for module in moved:
        expected = oracle.values(done.source, module)
        weight, scale = done.out[f"{module}.weight"], done.out.get(f"{module}.scale")
        if dtype == "bf16":
            assert torch.equal(weight, expected.float().bfloat16())
            continue
        assert scale is not None
        if module.startswith("mtp."):  # FP8 already: bytes and scales stay
            assert oracle.same(weight, done.source[f"{module}.weight"])
            assert oracle.same(scale, done.source[f"{module}.scale"])
            continue
        assert_true_block_scales(weight, scale, expected)
        assert_nearest_e4m3(oracle.fp8(weight, scale), expected, scale, tolerance=2.0**-23)
    others = {n for n in done.out if n.rpartition(".")[0] not in moved}
    assert others == {n for n in plain.out if n.rpartition(".")[0] not in moved}
    assert not [n for n in others if not oracle.same(done.out[n], plain.out[n])]


class TestFusedScales:
    """`two-scales`: the second of every pair has a weight_scale_2 and an input_scale of its own."""

    def groups(self, source):
        packed = [n.removesuffix(".weight_scale_2") for n in source if n.endswith("scale_2")]
        found = {fused_with(module) for module in packed}
        return [group for group in found if len(group) > 1 and "compressor" not in group[0]]

    def test_one_weight_scale_2_the_larger(self, run):
        done = run("two-scales")
        groups = self.groups(done.source)
        assert len(groups) == 5 * 16 + 4 + 4
        for group in groups:
            before = [float(done.source[f"{m}.weight_scale_2"]) for m in group]
            after = [done.out[f"{m}.weight_scale_2"] for m in group]
            assert before[0] != before[1]
            assert [float(t) for t in after] == [max(before)] * 2
            assert all(t.shape == () and t.dtype == torch.float32 for t in after)

    def test_one_input_scale_the_larger(self, run):
        done = run("two-scales")
        for group in self.groups(done.source):
            before = [float(done.source[f"{m}.input_scale"]) for m in group]
            after = [float(done.out[f"{m}.input_scale"]) for m in group]
            assert before[0] != before[1]
            assert after == [max(before)] * 2

    def test_values_keep_their_place_and_move_by_one_rounding_at_most(self, run, oracle):
        done = run("two-scales")
        for group in self.groups(done.source):
            for module in group:
                assert oracle.same(done.out[f"{module}.weight"], done.source[f"{module}.weight"])
                expected = oracle.values(done.source, module)
                found = oracle.values(done.out, module)
                # half a step of E4M3: relative 2^-4, or 2^-10 of a subnormal block scale
                top = float(done.out[f"{module}.weight_scale_2"])
                bound = torch.maximum(expected.abs() * 2.0**-4, torch.tensor(6 * 2.0**-10 * top))
                assert bool(((found - expected).abs() <= bound).all()), module

    def test_powers_of_two_are_exact(self, run, oracle):
        done = run("two-scales")
        exact = 0
        for group in self.groups(done.source):
            first, second = (float(done.source[f"{m}.weight_scale_2"]) for m in group)
            if second / first in (0.5, 0.125, 2.0):
                for module in group:
                    expected = oracle.values(done.source, module)
                    smallest = done.out[f"{module}.weight_scale"].float()
                    if bool((smallest[smallest > 0] >= 2.0**-6).all()):
                        exact += 1
                        assert torch.equal(oracle.values(done.out, module), expected)
        assert exact > 40

    def test_the_report_counts_inexact_blocks(self, run, oracle):
        done = run("two-scales")
        for path, ending in (("layers.*.ffn.experts", ".ffn.experts."),
                             ("layers.*.attn.wq_a", ".attn."),
                             ("layers.*.ffn.shared_experts.w1", ".shared_experts.")):  # fmt: skip
            groups = [g for g in self.groups(done.source)
                      if ending in g[0] and g[0].startswith("layers.")]  # fmt: skip
            blocks, inexact, worst = 0, 0, 0.0
            for module in (module for group in groups for module in group):
                old, new = (oracle.values(side, module) for side in (done.source, done.out))
                before, after = (v.unflatten(-1, (-1, 16)) for v in (old, new))
                blocks += before[..., 0].numel()
                # relative to the block: all of its values move by the same factor
                error = (after - before).abs().amax(-1) / before.abs().amax(-1).clamp(min=1e-300)
                moved = error > 1e-6  # weight_scale_2 * ratio was rounded to float32
                inexact += int(moved.sum())
                worst = max(worst, float(error.max()))
            found = done.report.unified[path]
            assert found.groups == len(groups)
            assert found.blocks == blocks
            assert inexact > 0
            assert abs(found.inexact_blocks - inexact) <= blocks * 0.002
            assert found.max_relative_error == pytest.approx(worst, rel=1e-3)

    def test_empty_blocks_do_not_count_as_inexact(self, run):
        """A block without a value loses nothing, whatever its scale becomes."""
        whole = run("full")
        module = "layers.1.attn.wkv"
        codes, scale, scale_2 = (whole.source[f"{module}.{p}"] for p in ("weight", *SCALES[:2]))
        codes, smaller = codes.clone(), scale_2 * 0.3
        codes[::2] = 0x80  # zeros of both signs
        changed = {f"{module}.weight": codes, f"{module}.weight_scale_2": smaller}
        transform = Transform(whole.stored, Options())
        out = dict(transform.apply((whole.source | changed).items()))
        ratio = float(smaller) / float(scale_2)
        moved = out[f"{module}.weight_scale"].double() != scale.double() * ratio
        assert bool(moved[::2].any())
        found = transform.report.unified["layers.*.attn.wq_a"]
        assert found.groups == 1
        assert found.inexact_blocks == int(moved[1::2].sum())

    def test_equal_pairs_are_not_touched(self, run):
        assert run("full").report.unified == {}


def test_scalars_leave_as_scalars(run, checkpoints, checkpoint, tmp_path):
    """Some writers store weight_scale_2 and input_scale as [1]."""
    folder = shutil.copytree(checkpoint("full"), tmp_path / "copy")

    def edit(tensors):
        for name, tensor in tensors.items():
            if name.endswith(("weight_scale_2", "input_scale")):
                tensors[name] = tensor.reshape(1)

    checkpoints.change(folder, edit)
    transform = Transform(read_stored(folder), Options(wo_a_dtype="bf16", attn_dtype="fp8"))
    out = dict(transform.apply(checkpoints.read(folder).items()))
    scalars = [t for n, t in out.items() if n.endswith(("weight_scale_2", "input_scale"))]
    assert len(scalars) > 400
    assert all(t.shape == () for t in scalars)


class TestFP8Scales:
    """FP8 that is stored: E8M0 or FP32 scales, whichever the model's expert_dtype asks for."""

    MODULE = "layers.1.attn.wo_a"

    def through(self, run, stored_scale, *, expert_dtype="fp4"):
        done = run("full")
        config = {**done.stored.config, "expert_dtype": expert_dtype}
        source = {**done.source, f"{self.MODULE}.scale": stored_scale}
        transform = Transform(replace(done.stored, config=config), Options())
        return done.source, dict(transform.apply(source.items())), transform.report

    def test_e8m0_stays(self, run, oracle):
        scale = run("full").source[f"{self.MODULE}.scale"]
        source, out, report = self.through(run, scale)
        assert oracle.same(out[f"{self.MODULE}.scale"], source[f"{self.MODULE}.scale"])
        assert not report.requantized

    def test_e8m0_becomes_fp32_where_experts_are_fp8(self, run, oracle):
        scale = run("full").source[f"{self.MODULE}.scale"]
        source, out, _ = self.through(run, scale, expert_dtype="fp8")
        assert out[f"{self.MODULE}.scale"].dtype == torch.float32
        assert torch.equal(oracle.values(out, self.MODULE), oracle.values(source, self.MODULE))

    def test_fp32_powers_of_two_become_e8m0_exactly(self, run, oracle):
        scale = run("full").source[f"{self.MODULE}.scale"]
        wide = (2.0 ** (scale.view(torch.uint8).double() - 127)).float()
        source, out, report = self.through(run, wide)
        assert oracle.same(out[f"{self.MODULE}.scale"], scale)
        assert oracle.same(out[f"{self.MODULE}.weight"], source[f"{self.MODULE}.weight"])
        assert not report.requantized

    def test_other_fp32_scales_are_rounded_again_and_reported(self, run, oracle):
        scale = run("full").source[f"{self.MODULE}.scale"]
        wide = (2.0 ** (scale.view(torch.uint8).double() - 127)).float() * 1.3
        source, out, report = self.through(run, wide)
        expected = oracle.fp8(source[f"{self.MODULE}.weight"], wide)
        found_scale = out[f"{self.MODULE}.scale"]
        assert_true_block_scales(out[f"{self.MODULE}.weight"], found_scale, expected)
        found = oracle.values(out, self.MODULE)
        assert_nearest_e4m3(found, expected, found_scale, tolerance=2.0**-22)
        assert report.requantized["layers.*.attn.wo_a"].linears == 1

    def test_fp32_stays_where_experts_are_fp8(self, run, oracle):
        scale = run("full").source[f"{self.MODULE}.scale"]
        wide = (2.0 ** (scale.view(torch.uint8).double() - 127)).float() * 1.3
        _, out, _ = self.through(run, wide, expert_dtype="fp8")
        assert oracle.same(out[f"{self.MODULE}.scale"], wide)

    def test_unlabelled_bytes_are_refused(self, run):
        scale = run("full").source[f"{self.MODULE}.scale"]
        with pytest.raises(CheckpointError, match=rf"{self.MODULE}.*torch.uint8.*label them"):
            self.through(run, scale.view(torch.uint8))

    def test_made_scales_are_fp32_where_experts_are_fp8(self, run, oracle):
        done = run("all-nvfp4")
        config = {**done.stored.config, "expert_dtype": "fp8"}
        transform = Transform(replace(done.stored, config=config), Options())
        out = dict(transform.apply(done.source.items()))
        scale = out[f"{self.MODULE}.scale"]
        expected = oracle.values(done.source, self.MODULE)
        assert scale.dtype == torch.float32
        amax = expected[:128, :128].abs().max()
        assert float(scale[0, 0]) == pytest.approx(float(amax) / 448, rel=1e-6)
        found = oracle.values(out, self.MODULE)
        assert bool(((found - expected).abs() <= expected.abs() * 2.0**-4 + 1e-4).all())

    def test_without_an_expert_dtype_it_is_e8m0(self, run, oracle):
        done = run("full")
        config = {k: v for k, v in done.stored.config.items() if k != "expert_dtype"}
        transform = Transform(replace(done.stored, config=config), Options())
        out = dict(transform.apply(done.source.items()))
        name = f"{self.MODULE}.scale"
        assert oracle.same(out[name], done.source[name])

    def test_values_between_two_codes_are_rounded_once(self):
        """Just above the middle of two codes; BF16 on the way would put it on the middle."""
        scale = torch.tensor([[1.0625 + 2.0**-12]])
        codes = torch.ones(128, 128).to(torch.float8_e4m3fn)
        made, _ = to_fp8({"weight": codes, "scale": scale}, "fp8_block", e8m0=True)
        # the scale is 2^-8, so that the value lies at 272 between 256 and 288
        assert set(made["weight"].float().flatten().tolist()) == {288.0}

    @pytest.mark.parametrize("other", [1.3, 2.0**-140])  # no power of two; below E8M0's
    def test_one_scale_that_is_not_exact_is_enough(self, other):
        assert fp8_scale(torch.tensor([[1.0, other]]), e8m0=True) is None
        assert fp8_scale(torch.tensor([[1.0, 0.25]]), e8m0=True) is not None

    @pytest.mark.parametrize("shape", [(192, 128), (128, 130), (64, 64)])
    def test_blocks_at_the_edge_are_blocks(self, oracle, shape):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        weight = weight.to(torch.float8_e4m3fn)
        blocks = [math.ceil(size / 128) for size in shape]
        scale = torch.full(blocks, 0.5)
        found = to_bf16({"weight": weight, "scale": scale}, "fp8_block")["weight"]
        assert torch.equal(found, oracle.fp8(weight, scale).bfloat16())
