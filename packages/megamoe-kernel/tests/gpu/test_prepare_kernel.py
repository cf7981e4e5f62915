"""The kernel of prepare_inputs gives quantize_tokens' bytes, wherever it is called from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megamoe_kernel import (
    ArchitectureError,
    LaunchError,
    SymmBuffer,
    get_symm_buffer_for_nvfp4_mega_moe,
    prepare_inputs,
    quantize_tokens,
)
from megamoe_kernel.jit import cache as jit_cache
from megamoe_kernel.jit.compile import compile_kernel
from megamoe_kernel.jit.driver import LoadedKernel
from megamoe_kernel.prepare_kernel import VALUES, has_kernel, prepare_source
from nvfp4_codec import quantize_fp8_block

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not has_kernel(torch.device("cuda", 0)):
        pytest.skip("needs compute capability 9.0, 10.0 or 10.3")
    folder: Path = tmp_path_factory.mktemp("cubins")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit_cache, "default_folder", lambda: folder)
        yield


def _buffer(hidden: int, tokens: int) -> SymmBuffer:
    buffer = get_symm_buffer_for_nvfp4_mega_moe(
        num_experts=4, num_max_tokens_per_rank=tokens + 2, num_topk=2, hidden=hidden,
        intermediate=128, activation="nvfp4", device="cuda",
    )  # fmt: skip
    for name in ("x", "x_sf", "x_scale"):
        buffer.field(name).view(torch.uint8).fill_(0xA5)
    return buffer


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("hidden", [128, 7168])
def test_bf16_tokens_are_copied_with_their_routing(ids: torch.dtype, hidden: int) -> None:
    tokens, topk = 5, 6
    buffer = get_symm_buffer_for_nvfp4_mega_moe(
        num_experts=8, num_max_tokens_per_rank=tokens + 2, num_topk=topk, hidden=hidden,
        intermediate=128, activation="bf16", device="cuda",
    )  # fmt: skip
    for name in ("x", "topk_idx", "topk_weights"):
        buffer.field(name).view(torch.uint8).fill_(0xA5)
    x = torch.randn(tokens, 2 * hidden, device="cuda").bfloat16()[:, :hidden]  # rows apart
    given = {
        "x": x,
        "topk_idx": torch.randint(-1, 8, (tokens, topk), dtype=ids, device="cuda"),
        "topk_weights": torch.rand(tokens, topk, device="cuda"),
    }
    prepare_inputs(x, buffer, topk_idx=given["topk_idx"], topk_weights=given["topk_weights"])
    for name, wanted in given.items():
        found = buffer.field(name)
        assert torch.equal(found[:tokens], wanted.to(found.dtype)), name
        assert bool((found[tokens:].contiguous().view(torch.uint8) == 0xA5).all()), name
    buffer.destroy()


def _check(buffer: SymmBuffer, x: Tensor) -> None:
    expected = quantize_tokens(x.cpu())
    tokens = x.shape[0]
    for name, wanted in (
        ("x", expected.codes), ("x_sf", expected.block_scale),
        ("x_scale", expected.scale.unsqueeze(1)),
    ):  # fmt: skip
        found = buffer.field(name).view(torch.uint8).cpu()
        assert torch.equal(found[:tokens], wanted.view(torch.uint8)), name
        assert bool((found[tokens:] == 0xA5).all()), name


def _hidden_states(tokens: int, hidden: int) -> Tensor:
    """Every size of number: zeros of both signs, float32's smallest, outliers, ties."""
    generator = torch.Generator().manual_seed(tokens + hidden)
    x = torch.randn(tokens, hidden, generator=generator)
    x *= (
        torch.exp2(torch.randint(-20, 20, (tokens, hidden // 16), generator=generator).float())[
            :, :, None
        ]
        .expand(-1, -1, 16)
        .reshape(tokens, hidden)
    )
    x[1:2] = -0.0
    x[2:3] *= 1e-38
    x[3:4, 5] = 6e4
    x[4:5, 16:64] = 0
    x[5:6] = torch.randint(-12, 13, (hidden,), generator=generator) / 4
    return x


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("hidden", [128, 384, 4096, 7168, 16384])
@pytest.mark.parametrize("tokens", [1, 33])
def test_bit_for_bit(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x = _hidden_states(tokens, hidden).to(dtype).nan_to_num().cuda()
    buffer = _buffer(hidden, tokens)
    prepare_inputs(x, buffer, backend="kernel")
    _check(buffer, x)


def test_every_bf16_number() -> None:
    """Each finite BF16 magnitude once, in tokens of its neighbours and in tokens of all sizes."""
    bits = torch.arange(0x7F80, dtype=torch.int32)
    values = (bits << 16).view(torch.float32).to(torch.bfloat16)
    shuffled = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(0))]
    x = torch.cat([values, -values, shuffled, -shuffled]).view(-1, 128).cuda()
    buffer = _buffer(128, x.shape[0])
    prepare_inputs(x, buffer)
    _check(buffer, x)


def test_rows_that_are_not_packed() -> None:
    whole = _hidden_states(9, 1024).to(torch.bfloat16).cuda()
    for x in (whole[:, 256:512], whole[:, 3:259], whole[::2, :256], whole[:, :512:2]):
        buffer = _buffer(256, x.shape[0])
        prepare_inputs(x, buffer)
        _check(buffer, x)


@pytest.mark.parametrize("scale_fmt", ["fp32", "ue8m0"])
def test_fp8_hidden_states(scale_fmt: str) -> None:
    fp8 = quantize_fp8_block(torch.randn(7, 512), block=(1, 128), scale_fmt=scale_fmt)  # type: ignore[arg-type]
    decoded = fp8.weight.float() * fp8.weight_scale.float().repeat_interleave(128, 1)
    buffer = _buffer(512, 7)
    prepare_inputs(fp8.weight.cuda(), buffer, fp8.weight_scale.cuda())
    _check(buffer, decoded)


@pytest.mark.parametrize(("hidden", "before"), [(7168, True), (640, False)])
def test_in_a_cuda_graph(hidden: int, before: bool) -> None:
    """Also if the first call of all is captured; no other test has that width."""
    first, second = (_hidden_states(n, hidden)[:4].to(torch.bfloat16) for n in (8, 9))
    x, buffer = first.cuda(), _buffer(hidden, 4)
    ids = torch.tensor([[0, 1]] * 4, device="cuda")
    weights = torch.rand(4, 2, device="cuda")
    if before:
        prepare_inputs(x, buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare_inputs(x, buffer, topk_idx=ids, topk_weights=weights)
    x.copy_(second)
    ids.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    _check(buffer, second)
    assert bool((buffer.topk_idx[:4] == 3).all())


def test_in_another_thread_and_stream() -> None:
    """A thread that never used CUDA has no context; a side stream is the current one."""
    x, buffer = _hidden_states(16, 512).to(torch.bfloat16).cuda(), _buffer(512, 16)
    prepare_inputs(x, buffer)
    torch.cuda.synchronize()
    for name in ("x", "x_sf", "x_scale"):
        buffer.field(name)[:16].view(torch.uint8).fill_(0)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                prepare_inputs(x, buffer, backend="kernel")
            stream.synchronize()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    _check(buffer, x)


def test_no_tokens() -> None:
    buffer = _buffer(256, 0)
    prepare_inputs(torch.empty(0, 256, device="cuda"), buffer)
    _check(buffer, torch.empty(0, 256))


@pytest.mark.hopper
def test_a_blackwell_kernel_is_refused_by_name() -> None:
    source = prepare_source(torch.bfloat16, 128)
    cubin = compile_kernel(source, "sm_100a").cubin
    device = torch.device("cuda", 0)
    with pytest.raises(ArchitectureError, match="for sm_100a runs on .* 10.0, this GPU has 9.0"):
        LoadedKernel(cubin, source.name, "sm_100a", device, threads=32)
    with pytest.raises(LaunchError, match="the CUDA driver fails to load prepare_inputs"):
        LoadedKernel(cubin, source.name, "sm_90a", device, threads=32)
    with pytest.raises(LaunchError, match="no entry point 'other'"):
        LoadedKernel(cubin, "other", "sm_90a", device, threads=32)
