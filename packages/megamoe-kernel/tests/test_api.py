"""The calls of a runtime: what goes in comes out as the reference says, or is refused first."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megamoe_kernel
from megamoe_kernel import (
    ArchitectureError,
    BackendError,
    DtypeError,
    LayoutError,
    MegaMoEError,
    MegaMoEWeights,
    RecipeError,
    RoutingError,
    ScaleError,
    ShapeError,
    SymmBuffer,
    api,
    fp8_nvfp4_mega_moe,
    get_symm_buffer_for_nvfp4_mega_moe,
    nvfp4_mega_moe,
    prepare_inputs,
    quantize_tokens,
    transform_nvfp4_weights_for_mega_moe,
)
from megamoe_kernel.reference import Activation, RankTokens, mega_moe
from megamoe_kernel.weights import Arch
from nvfp4_codec import quantize_fp8_block

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 5, 256, 128, 4, 2
CASES: list[tuple[Arch, Activation]] = [("sm_100a", "nvfp4"), ("sm_90a", "bf16")]


def _buffer(activation: Activation, **changes: Any) -> SymmBuffer:
    sizes: dict[str, Any] = {
        "num_experts": EXPERTS, "num_max_tokens_per_rank": 8, "num_topk": TOPK,
        "hidden": HIDDEN, "intermediate": INTERMEDIATE, "activation": activation,
    }  # fmt: skip
    return get_symm_buffer_for_nvfp4_mega_moe(**{**sizes, **changes})


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK, -1).indices
    ids[1, 0] = -1
    return x, ids, torch.rand(TOKENS, TOPK, generator=generator)


@pytest.fixture(scope="module")
def ready(make_layer: Any) -> dict[str, Any]:
    """Per activation: weights, shared weights and a filled buffer."""
    layer = make_layer(EXPERTS, HIDDEN, INTERMEDIATE)
    extra = make_layer(1, HIDDEN, INTERMEDIATE, seed=1, largest=3.0)
    cases: dict[str, Any] = {"layer": layer, "extra": extra}
    x, ids, weights = _inputs()
    for arch, activation in CASES:
        buffer = _buffer(activation)
        prepare_inputs(x, buffer, topk_idx=ids, topk_weights=weights)
        l1, l2 = transform_nvfp4_weights_for_mega_moe(layer.w13, layer.w2, arch=arch)
        cases[activation] = SimpleNamespace(
            buffer=buffer,
            l1=l1,
            l2=l2,
            shared=transform_nvfp4_weights_for_mega_moe(extra.w13, extra.w2, arch=arch),
        )
    return cases


@pytest.mark.parametrize("with_shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize("activation", ["nvfp4", "bf16"])
def test_the_reference_backend_is_the_reference(
    activation: Activation, with_shared: bool, ready: dict[str, Any]
) -> None:
    case, layer, extra = ready[activation], ready["layer"], ready["extra"]
    x, ids, weights = _inputs()
    tokens = RankTokens(quantize_tokens(x) if activation == "nvfp4" else x, ids, weights)
    (expected,) = mega_moe(
        [tokens],
        layer.w13,
        layer.w2,
        activation=activation,
        swiglu_limit=10.0,
        shared=(extra.w13, extra.w2) if with_shared else None,
    )
    y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    fp8_nvfp4_mega_moe(
        y,
        case.l1,
        case.l2,
        case.buffer,
        activation=activation,
        swiglu_limit=10.0,
        shared=case.shared if with_shared else None,
        backend="reference",
    )
    assert torch.equal(y.view(torch.int16), expected.view(torch.int16))
    assert nvfp4_mega_moe is fp8_nvfp4_mega_moe


def test_the_output_may_want_gradients(ready: dict[str, Any]) -> None:
    case = ready["bf16"]
    y = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    fp8_nvfp4_mega_moe(y, case.l1, case.l2, case.buffer, activation="bf16", backend="reference")
    assert y.is_leaf
    assert y.detach().any()


def test_fewer_tokens_than_last_time(ready: dict[str, Any]) -> None:
    """Old rows stay in the buffer; y says how many count, and none is a number."""
    case = ready["bf16"]
    options: Any = {"activation": "bf16", "backend": "reference"}
    whole = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    fp8_nvfp4_mega_moe(whole, case.l1, case.l2, case.buffer, **options)
    y = torch.empty(2, HIDDEN, dtype=torch.bfloat16)
    fp8_nvfp4_mega_moe(y, case.l1, case.l2, case.buffer, **options)
    assert torch.equal(y.view(torch.int16), whole[:2].view(torch.int16))
    fp8_nvfp4_mega_moe(y[:0], case.l1, case.l2, case.buffer, **options)
    prepare_inputs(torch.empty(0, HIDDEN), case.buffer)


@pytest.mark.parametrize("scale_fmt", ["fp32", "ue8m0"])
def test_fp8_hidden_states_fit_both_activations(scale_fmt: Any) -> None:
    x, _, _ = _inputs()
    fp8 = quantize_fp8_block(x, block=(1, 128), scale_fmt=scale_fmt)
    decoded = fp8.weight.float() * fp8.weight_scale.float().repeat_interleave(128, 1)
    nvfp4, bf16 = _buffer("nvfp4"), _buffer("bf16")
    prepare_inputs(fp8.weight, nvfp4, fp8.weight_scale)
    prepare_inputs(fp8.weight, bf16, fp8.weight_scale)
    expected = quantize_tokens(decoded)
    assert nvfp4.x_sf is not None
    assert nvfp4.x_scale is not None
    assert torch.equal(nvfp4.x[:TOKENS], expected.codes)
    assert torch.equal(
        nvfp4.x_sf[:TOKENS].view(torch.uint8), expected.block_scale.view(torch.uint8)
    )
    assert torch.equal(nvfp4.x_scale[:TOKENS], expected.scale)
    assert torch.equal(bf16.x[:TOKENS], decoded.to(torch.bfloat16))
    assert not nvfp4.x[TOKENS:].any()


def test_hidden_states_may_want_gradients() -> None:
    x = torch.ones(2, HIDDEN, requires_grad=True)
    for buffer in (_buffer("nvfp4"), _buffer("bf16")):
        prepare_inputs(x, buffer)
        parts = (buffer.x, buffer.x_scale)
        assert not any(part.requires_grad for part in parts if part is not None)


def test_the_buffer_starts_without_tokens() -> None:
    buffer = _buffer("nvfp4")
    assert bool((buffer.topk_idx == -1).all())
    assert buffer.topk_idx.dtype == torch.int64
    assert (buffer.rank_idx, buffer.num_ranks, buffer.num_experts_per_rank) == (0, 1, EXPERTS)
    assert _buffer("bf16").x_sf is None


class Group:
    """A process group as far as its size."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"hidden": 200}, ShapeError, "hidden is 200, expected a positive multiple of 128"),
        ({"intermediate": 0}, ShapeError, "intermediate is 0"),
        ({"num_topk": 5}, ShapeError, "num_topk is 5, expected 1 to 32 and at most 4 experts"),
        ({"num_topk": 0}, ShapeError, "num_topk is 0"),
        ({"num_max_tokens_per_rank": 0}, ShapeError, "num_max_tokens_per_rank is 0"),
        ({"num_experts": -4}, ShapeError, "num_experts is -4"),
        ({"activation": "fp8"}, RecipeError, "activation is 'fp8'"),
        ({"group": Group(3)}, ShapeError, "num_experts is 4, expected a multiple of the 3 ranks"),
        ({"group": Group(4)}, BackendError, r"4 ranks and device is cpu.*reference\.mega_moe"),
        ({"hidden": True}, ShapeError, "hidden is True"),
        ({"num_experts": True, "num_topk": 1}, ShapeError, "num_experts is True"),
        ({"num_topk": True}, ShapeError, "num_topk is True"),
        ({"num_topk": 2.0}, ShapeError, "num_topk is 2.0"),
        ({"num_topk": "2"}, ShapeError, "num_topk is 2"),
        ({"num_max_tokens_per_rank": 10**30}, ShapeError, "positive integer of at most 1048576"),
        ({"ring_rows": 256.0}, ShapeError, "ring_rows is 256.0"),
        ({"group": "x"}, DtypeError, "group is a str, expected a ProcessGroup"),
        ({"num_experts": 10**30}, ShapeError, "expected 1 to 65536"),
        ({"hidden": 1 << 40}, ShapeError, "hidden is 1099511627776, expected at most 1048576"),
        ({"device": "meta"}, BackendError, "device is 'meta', expected 'cuda', or 'cpu'"),
        ({"device": "gpu"}, BackendError, "device is 'gpu', expected a device of torch"),
        ({"device": None}, BackendError, "device is None"),
        ({"group": Group(80)}, BackendError, "80 ranks, the largest NVLink domain has 72 GPUs"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_buffers_that_cannot_be(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        _buffer(**{"activation": "nvfp4", **changes})


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="device is 'cuda:0' and torch finds no GPU"):
        _buffer("nvfp4", device="cuda:0")


def test_a_gpu_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BackendError, match="device is 'cuda:2' and torch finds 2 GPUs here"):
        _buffer("nvfp4", device="cuda:2")


def test_a_group_of_one_is_this_process() -> None:
    assert _buffer("nvfp4", group=Group(1)).num_ranks == 1


X = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
IDS = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
WEIGHTS = torch.zeros(TOKENS, TOPK)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"x": X[:, :128]}, ShapeError, r"x has shape \(5, 128\), expected \(5, 256\)"),
        ({"x": X.repeat(2, 1)}, ShapeError, "x has 10 tokens, the buffer holds 8"),
        ({"x": X.int()}, DtypeError, "x is torch.int32"),
        ({"topk_idx": IDS}, DtypeError, "come together"),
        ({"topk_idx": IDS.float(), "topk_weights": WEIGHTS}, DtypeError, "topk_idx is torch.float"),
        ({"topk_idx": IDS, "topk_weights": WEIGHTS.double()}, DtypeError, "topk_weights is"),
        ({"topk_idx": IDS[:4], "topk_weights": WEIGHTS}, ShapeError, "topk_idx has shape"),
        ({"topk_idx": IDS, "topk_weights": WEIGHTS[:, :1]}, ShapeError, "topk_weights has shape"),
        ({"x": X.to("meta")}, ShapeError, "x is on meta, the buffer on cpu"),
        ({"sym_buffer": [1]}, DtypeError, "sym_buffer is a list"),
        ({"x": X.to_sparse()}, DtypeError, "x is torch.sparse_coo, expected a dense tensor"),
        ({"topk_idx": IDS.to_sparse(), "topk_weights": WEIGHTS}, DtypeError, "sparse_coo"),
        ({"topk_idx": [[0]], "topk_weights": WEIGHTS}, DtypeError, "topk_idx is a list"),
        ({"topk_idx": IDS, "topk_weights": [[0]]}, DtypeError, "topk_weights is a list"),
        ({"x": X.to(torch.float8_e4m3fn), "scales": [1.0]}, DtypeError, "scales is a list"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_inputs_that_do_not_fit(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    given = {"x": X, "sym_buffer": _buffer("nvfp4"), **arguments}
    with pytest.raises(error, match=match):
        prepare_inputs(**given)


@pytest.mark.parametrize("activation", ["nvfp4", "bf16"])
def test_a_kernel_that_is_not_there_is_refused_before_anything_is_written(
    activation: Activation,
) -> None:
    buffer = _buffer(activation)
    assert buffer.memory is not None
    before = buffer.memory.clone()
    with pytest.raises(BackendError, match="no kernel for cpu; pass backend='reference'"):
        prepare_inputs(X + 1, buffer, topk_idx=IDS, topk_weights=WEIGHTS + 1, backend="kernel")
    assert torch.equal(buffer.memory, before)


Y = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)


def _refused(case: Any, error: type[MegaMoEError], match: str, **changes: Any) -> None:
    arguments = {
        "y": Y.clone(),
        "l1_weights": case.l1,
        "l2_weights": case.l2,
        "sym_buffer": case.buffer,
        "activation": case.buffer.activation,
        "swiglu_limit": 10.0,
        "backend": "reference",
        **changes,
    }
    with pytest.raises(error, match=match):
        fp8_nvfp4_mega_moe(**arguments)
    assert "y" in changes or not arguments["y"].any()


def test_activations_that_an_architecture_lacks_are_refused_by_name(ready: dict[str, Any]) -> None:
    fp4, bf16 = ready["nvfp4"], ready["bf16"]
    _refused(
        bf16, ArchitectureError, "sm_90a has no activation 'nvfp4': .*no FP4", activation="nvfp4"
    )
    _refused(fp4, ArchitectureError, "sm_100a has no activation 'bf16'", activation="bf16")
    for case in (fp4, bf16):
        _refused(
            case, ArchitectureError, "no tensor core multiplies FP8 by NVFP4", activation="fp8"
        )
        _refused(
            case, RecipeError, "activation is 'int8', expected one of: nvfp4", activation="int8"
        )
    _refused(fp4, LayoutError, "buffer is for activation 'bf16'", sym_buffer=bf16.buffer)


@pytest.mark.parametrize("activation", ["nvfp4", "bf16"])
def test_calls_that_cannot_be_are_refused_before_anything_runs(
    activation: Activation, ready: dict[str, Any]
) -> None:
    case = ready[activation]
    l1, l2 = case.l1, case.l2
    arch = l1.arch

    def resized(experts: int, hidden: int) -> tuple[MegaMoEWeights, MegaMoEWeights]:
        w13 = megamoe_kernel.ExpertWeights(
            torch.zeros(experts, 2 * INTERMEDIATE, hidden // 2, dtype=torch.uint8),
            torch.zeros(experts, 2 * INTERMEDIATE, hidden // 16).to(torch.float8_e4m3fn),
            torch.ones(experts, 2),
        )
        w2 = megamoe_kernel.ExpertWeights(
            torch.zeros(experts, hidden, INTERMEDIATE // 2, dtype=torch.uint8),
            torch.zeros(experts, hidden, INTERMEDIATE // 16).to(torch.float8_e4m3fn),
            torch.ones(experts, 1),
            torch.tensor(1.0),
        )
        return transform_nvfp4_weights_for_mega_moe(w13, w2, arch=arch)

    few, small = resized(2, HIDDEN), resized(EXPERTS, 128)
    other = next(ready[a].l2 for _, a in CASES if a != activation)
    _refused(case, RecipeError, r"recipe is \(1, 1, 32\), expected \(1, 1, 16\)", recipe=(1, 1, 32))
    _refused(case, RecipeError, "recipe is None", recipe=None)
    _refused(case, RecipeError, "swiglu_limit is -1", swiglu_limit=-1)
    _refused(case, RecipeError, "swiglu_limit is nan", swiglu_limit=float("nan"))
    for no_number in ("10", True, torch.tensor(10.0), 10**400):
        _refused(case, RecipeError, "swiglu_limit is", swiglu_limit=no_number)
    _refused(case, RecipeError, "activation is \\['nvfp4'\\], expected", activation=["nvfp4"])
    _refused(case, DtypeError, "sym_buffer is a Tensor", sym_buffer=Y)
    _refused(case, LayoutError, "l1_weights is a ExpertWeights", l1_weights=ready["layer"].w13)
    _refused(case, LayoutError, "l1_weights was transformed as l2", l1_weights=l2, l2_weights=l1)
    _refused(case, LayoutError, "l2_weights was transformed as l1", l2_weights=l1)
    _refused(case, LayoutError, "l1_weights is 2 experts of 256x256", l1_weights=few[0])
    _refused(case, LayoutError, "l2_weights is 4 experts of 128x128", l2_weights=small[1])
    _refused(case, LayoutError, "l1_weights are for", l2_weights=other)
    _refused(case, LayoutError, "shared is no pair", shared=l1)
    _refused(case, LayoutError, "shared l1_weights is 4 experts", shared=(l1, l2))
    wrong = next(ready[a].shared for _, a in CASES if a != activation)
    _refused(case, LayoutError, "shared is for", shared=wrong)
    _refused(case, DtypeError, "y is torch.float32", y=Y.float())
    _refused(case, ShapeError, r"y has shape \(5, 128\)", y=Y[:, :128])
    _refused(case, ShapeError, "y has 10 tokens, the buffer holds 8", y=Y.repeat(2, 1))
    _refused(case, ShapeError, "expected contiguous", y=torch.cat((Y, Y), 1)[:, ::2])
    _refused(case, ShapeError, "y is on meta", y=Y.to("meta"))
    moved = {name: getattr(l1, name) for name in ("weight", "scale", "alpha", "input_scale")}
    elsewhere = replace(l1, **{k: None if t is None else t.to("meta") for k, t in moved.items()})
    _refused(case, ShapeError, "l1_weights is on meta", l1_weights=elsewhere)
    _refused(case, BackendError, "backend is 'auto', expected", backend="auto")
    _refused(case, BackendError, "no kernel for .*backend='reference'", backend="kernel")


def test_the_reference_backend_has_one_rank(ready: dict[str, Any]) -> None:
    case = ready["nvfp4"]
    second = replace(case.buffer, num_experts=2 * EXPERTS, num_ranks=2, rank_idx=1)
    _refused(
        case,
        BackendError,
        r"the buffer is rank 1's of 2, .*megamoe_kernel\.reference\.mega_moe computes several",
        sym_buffer=second,
    )


def test_who_picks_a_kernel_that_no_gpu_has_run_is_told_once(
    ready: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Arch] = []
    for arch, _ in CASES:
        monkeypatch.setitem(api.LAYER_KERNELS, arch, lambda *_, arch=arch, **__: calls.append(arch))
    monkeypatch.setattr(api, "has_kernel", lambda device: True)
    api._warn_once.cache_clear()
    with caplog.at_level(logging.INFO, logger=api.__name__):
        for backend in ("reference", "kernel", "kernel"):
            for _, activation in CASES:
                case = ready[activation]
                fp8_nvfp4_mega_moe(
                    Y.clone(), case.l1, case.l2, case.buffer, activation=activation,
                    swiglu_limit=10.0, backend=backend,
                )  # fmt: skip
    assert calls == ["sm_100a", "sm_90a"] * 2
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "sm_100a was compiled and emulated, never run on a GPU" in warning.getMessage()
    assert "docs/blackwell.md" in warning.getMessage()
    api._warn_once.cache_clear()


def test_a_missing_input_scale_is_named(ready: dict[str, Any]) -> None:
    case, bf16 = ready["nvfp4"], ready["bf16"]
    bare = replace(case.l2, input_scale=None)
    _refused(case, ScaleError, "w2 has no input_scale", l2_weights=bare, backend="kernel")
    shared = (case.shared[0], replace(case.shared[1], input_scale=None))
    _refused(case, ScaleError, "w2 has no input_scale", shared=shared, backend="kernel")
    fp8_nvfp4_mega_moe(
        Y.clone(), bf16.l1, replace(bf16.l2, input_scale=None), bf16.buffer,
        activation="bf16", backend="reference",
    )  # fmt: skip


def test_an_expert_id_of_another_model(ready: dict[str, Any]) -> None:
    case = ready["bf16"]
    x, ids, weights = _inputs()
    ids[0, 0] = EXPERTS
    broken = _buffer("bf16")
    prepare_inputs(x, broken, topk_idx=ids, topk_weights=weights)
    _refused(case, RoutingError, "holds 4, expected 0 to 3", sym_buffer=broken)
