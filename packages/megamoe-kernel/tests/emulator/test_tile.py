"""One tile through copies, scales and products, against independent arithmetic.

Codes and scales are decoded by nvfp4_codec and summed in double; in the long run CUTLASS's
reference for block scaled products on the host (GettBlockScalingMainloopParams) decodes them too.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megamoe_kernel.layout_sm100 import to_scale_words
from nvfp4_codec import dequantize_nvfp4


class TileRun(ctypes.Structure):
    """``TileRun`` of csrc/emulator/tile_run.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "tokens", "weight_scales")),
        ("token_scales", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("sums", ctypes.c_void_p),
    )


def random_matrix(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """All codes; all scales that are numbers, subnormals and the largest included."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 127, (rows, columns // 16), generator=generator, dtype=torch.uint8)
    return codes, scale


def words_of(scale: Tensor, rows: int) -> Tensor:
    """Rows filled up to `rows`, words in the order of memory."""
    filled = scale.new_zeros(rows, scale.shape[1])
    filled[: scale.shape[0]] = scale
    return to_scale_words(filled[None])[0].T.contiguous()


@pytest.fixture
def emulate_tile(emulator_library: ctypes.CDLL) -> Callable[..., Tensor]:
    def run(weights: tuple[Tensor, Tensor], tokens: tuple[Tensor, Tensor], seed: int = 0) -> Tensor:
        num_tokens, columns = tokens[0].shape[0], 2 * tokens[0].shape[1]
        words = words_of(weights[1], 128), words_of(tokens[1], 256)
        sums = torch.full((128, num_tokens), float("nan"))
        message = ctypes.create_string_buffer(400)
        arguments = TileRun(
            weights[0].data_ptr(), tokens[0].data_ptr(), words[0].data_ptr(), words[1].data_ptr(),
            num_tokens, columns, seed, sums.data_ptr(),
        )  # fmt: skip
        code = emulator_library.megamoe_emulate_tile(ctypes.byref(arguments), message, 400)
        assert code == 0, message.value.decode()
        return sums

    return run


def decoded(matrix: tuple[Tensor, Tensor]) -> Tensor:
    codes, scale = matrix
    values = dequantize_nvfp4(
        codes, scale.view(torch.float8_e4m3fn), torch.ones(()), dtype=torch.float32
    )
    return values.double()


@pytest.mark.parametrize("columns", [64, 128, 192, 256, 320, 512])
@pytest.mark.parametrize("num_tokens", [16, 48, 144])
def test_sums_are_those_of_decoded_values(
    emulate_tile: Callable[..., Tensor], num_tokens: int, columns: int
) -> None:
    weights, tokens = random_matrix(128, columns, 1), random_matrix(num_tokens, columns, 2)
    sums = emulate_tile(weights, tokens, seed=columns + num_tokens)
    w, x = decoded(weights), decoded(tokens)
    # Rounded to float32 once for each 64 columns.
    bound = (w.abs() @ x.abs().T) * 2.0**-24 * (columns / 64)
    assert bool(((sums.double() - w @ x.T).abs() <= bound).all())


@pytest.mark.full
def test_sums_are_those_of_cutlass(emulate_tile: Callable[..., Tensor], tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ for CUTLASS's reference")
    files = metadata.distribution("nvidia-cutlass")
    cutlass = Path(str(files.locate_file("cutlass_library/source")))
    cuda = Path(
        str(metadata.distribution("nvidia-cuda-runtime").locate_file("nvidia/cu13/include"))
    )
    folders = [cutlass / "include", cutlass / "tools/util/include", cuda, cuda / "cccl"]
    library, source = tmp_path / "cutlass_tile.so", Path(__file__).with_name("cutlass_tile.cpp")
    # -fpermissive: a host compiler meets device functions in templates that are never used.
    options = ["-std=c++17", "-O1", "-w", "-fpermissive", "-shared", "-fPIC"]
    command = [compiler, *options, *(f"-I{folder}" for folder in folders), str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    multiply = ctypes.CDLL(str(library)).cutlass_block_scaled
    for seed in range(8):
        num_tokens, columns = (128, 144)[seed % 2], 256
        weights, tokens = random_matrix(128, columns, seed), random_matrix(num_tokens, columns, 99)
        found = torch.zeros(128, num_tokens)  # it also reads them, times zero
        # Its atoms of 128 rows follow each other along K, then along the rows.
        words = [
            words_of(scale, rows).view(-1, rows // 128, 128).transpose(0, 1).contiguous()
            for scale, rows in ((weights[1], 128), (tokens[1], -(-num_tokens // 128) * 128))
        ]
        pointers = (weights[0], tokens[0], *words, found)
        multiply(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in pointers), num_tokens, columns)
        sums = emulate_tile(weights, tokens, seed)
        scale = decoded(weights).abs() @ decoded(tokens).abs().T
        # CUTLASS adds one product after the other in float32.
        assert bool(((sums - found).double().abs() <= scale * 2.0**-24 * columns).all())
