"""MXFP4 to NVFP4 in a file, without touching the codes.

``nvfp4_codec.convert.mxfp4_to_nvfp4`` defines the result. Nearly every tensor is inside
the window where the cast only rewrites scale bytes, one table look-up each, while the codes
are copied inside the kernel, without torch. A tensor outside the window, or with NaN scales,
goes through the library function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .families import Family
from .header import TensorSpec, shown
from .reader import Bytes, Checkpoint
from .writer import ShardWriter

if TYPE_CHECKING:
    from ..convert.mxfp4 import OutsidePolicy

E8M0_BIAS: Final = 127
TOP_EXPONENT: Final = 8  # E4M3's powers of two are 2^-9..2^8
WINDOW: Final = 17
_LOWEST_TOP: Final = 9  # gives weight_scale_2 = 2^-126, the least normal float32
_BLOCK_BYTES: Final = 16
_PROBES: Final = 64
_CHUNK_BLOCKS: Final = 1 << 20


def largest_exponent(source: Checkpoint, family: Family, scales: Bytes) -> int | None:
    """The largest E8M0 byte that a block with a non-zero code uses; None if all are zero.

    scales: the family's scale bytes. Reads a few blocks of codes, all of them only if the
    blocks of large scale are zeros.
    """
    candidates = scales
    while len(candidates):
        byte = int(candidates.max())
        chosen = scales == byte
        first = np.array([chosen.argmax()])  # nearly always decides
        if _any_nonzero(source, family, first):
            return byte
        if _any_nonzero(source, family, np.flatnonzero(chosen)):
            return byte
        candidates = candidates[candidates < byte]
    return None


def _any_nonzero(source: Checkpoint, family: Family, blocks: NDArray[np.int64]) -> bool:
    one: Bytes = np.empty(_BLOCK_BYTES, dtype=np.uint8)
    for block in blocks[:_PROBES].tolist():
        source.read_into(family.weight.name, one, block * _BLOCK_BYTES)
        if (one & 0x77).any():
            return True
    return len(blocks) > _PROBES and bool((~zero_blocks(source, family))[blocks].any())


def zero_blocks(source: Checkpoint, family: Family) -> NDArray[np.bool_]:
    """For each block of 32 codes whether all are +-0, reading the codes in chunks."""
    count = family.weight.nbytes // _BLOCK_BYTES
    zero = np.empty(count, dtype=np.bool_)
    for start in range(0, count, _CHUNK_BLOCKS):
        stop = min(start + _CHUNK_BLOCKS, count)
        chunk: Bytes = np.empty((stop - start) * _BLOCK_BYTES, dtype=np.uint8)
        source.read_into(family.weight.name, chunk, start * _BLOCK_BYTES)
        words = chunk.view(np.uint64).reshape(-1, 2) & np.uint64(0x7777777777777777)
        zero[start:stop] = (words[:, 0] | words[:, 1]) == 0
    return zero


def joint_exponent(source: Checkpoint, group: Sequence[Family]) -> int | None:
    """The largest byte over tensors that share one weight_scale_2; None if all are zero."""
    found = []
    for family in group:
        assert family.scale is not None
        found.append(largest_exponent(source, family, source.read(family.scale.name)))
    return max((byte for byte in found if byte is not None), default=None)


def inside_window(scales: Bytes, top: int) -> bool:
    """True if the table covers every scale byte, given the largest one in use.

    Not so for NaN (255), nor for tops whose weight_scale_2 would be a subnormal float32.
    """
    lowest = max(top - WINDOW, 0)
    return (
        _LOWEST_TOP <= top < 255
        and bool(len(scales))
        and int(scales.max()) <= top
        and int(scales.min()) >= lowest
    )


def scale_table(top: int) -> bytes:
    """E8M0 byte -> the E4M3 byte of the same power of two, for bytes top - 17 .. top.

    2^(byte - 127) = e4m3 * weight_scale_2(top).
    """
    table = bytearray(256)
    for byte in range(max(top - WINDOW, 0), top + 1):
        exponent = byte - top + TOP_EXPONENT
        table[byte] = (exponent + 7) << 3 if exponent >= -6 else 1 << (exponent + 9)
    return bytes(table)


def weight_scale_2(top: int) -> bytes:
    """The global scale, 2^(top - 127 - 8) or the least normal, as the bytes of a float32."""
    exponent = max(top, _LOWEST_TOP) - E8M0_BIAS - TOP_EXPONENT
    return np.float32(2.0**exponent).tobytes()


class ScaleCaster:
    """Reads and casts scales in buffers that it keeps: fresh pages cost more than the cast.

    What ``read`` and ``cast`` return is valid until they are called again.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def read(self, source: Checkpoint, name: str) -> Bytes:
        """The E8M0 bytes of a scale tensor, flat."""
        scales = self._buffer("read", source.info(name).nbytes)
        source.read_into(name, scales)
        return scales

    def cast(self, scales: Bytes, top: int) -> Bytes:
        """The E4M3 scale bytes, two per E8M0 byte: one for each block of 16."""
        doubled = self._buffer("doubled", 2 * scales.size)
        pairs = doubled.view(np.uint16)
        if int(scales.min(initial=255)) > top - 15:
            # E4M3's normal powers of two are linear in the exponent; times 257 doubles a byte.
            shifted = self._buffer("shifted", scales.size)
            np.subtract(scales, np.uint8((top - 15) % 256), out=shifted)
            np.multiply(shifted, np.uint16(8 * 257), out=pairs, dtype=np.uint16)
        else:
            # bytes.translate is several times faster than indexing an array with uint8
            cast = np.frombuffer(scales.tobytes().translate(scale_table(top)), dtype=np.uint8)
            np.multiply(cast, np.uint16(257), out=pairs, dtype=np.uint16)
        return doubled

    def _buffer(self, use: str, size: int) -> Bytes:
        if use not in self._buffers or self._buffers[use].size < size:
            self._buffers[use] = np.empty(size, dtype=np.uint8)
        return self._buffers[use][:size]


class FamilyCaster:
    """Writes MXFP4 families as NVFP4.

    outside: what happens to blocks that the exact window does not hold, as in
        ``mxfp4_to_nvfp4``. It remembers the exponents of fused families, so that the second
        of them is not read twice.
    """

    def __init__(self, source: Checkpoint, outside: OutsidePolicy) -> None:
        self._source = source
        self._outside: OutsidePolicy = outside
        self._scales = ScaleCaster()
        self._tops: dict[str, int | None] = {}

    def write(
        self,
        writer: ShardWriter,
        family: Family,
        group: Sequence[Family],
        specs: tuple[TensorSpec, TensorSpec, TensorSpec],
    ) -> int:
        """Fills weight, weight_scale and weight_scale_2; returns the number of inexact blocks.

        group: the families that share one weight_scale_2, this one among them.
        """
        assert family.scale is not None
        scales = self._scales.read(self._source, family.scale.name)
        key = group[0].module
        if key not in self._tops:
            self._tops[key] = (
                largest_exponent(self._source, family, scales)
                if len(group) == 1
                else joint_exponent(self._source, group)
            )
        top = self._tops[key]
        weight, scale, scale_2 = specs
        if top is None or not inside_window(scales, top):
            return self._write_by_library(writer, family, specs, top)
        writer.copy(weight.name, self._source, family.weight, last=True)
        writer.write(scale.name, self._scales.cast(scales, top))
        writer.write(scale_2.name, weight_scale_2(top))
        return 0

    def _write_by_library(
        self,
        writer: ShardWriter,
        family: Family,
        specs: tuple[TensorSpec, TensorSpec, TensorSpec],
        top: int | None,
    ) -> int:
        """What the table cannot do: blocks outside the window, zeros only, NaN scales."""
        import torch

        from ..convert import mxfp4_to_nvfp4
        from .values import load_mxfp4

        global_scale = None
        if top is not None:
            raw = np.frombuffer(weight_scale_2(top), dtype=np.float32)
            global_scale = torch.from_numpy(raw.copy()).reshape(())
        weight, scale = load_mxfp4(self._source, family)
        made = mxfp4_to_nvfp4(weight, scale, weight_scale_2=global_scale, outside=self._outside)
        writer.write_tensor(specs[0].name, made.weight)
        writer.write_tensor(specs[1].name, made.weight_scale)
        writer.write_tensor(specs[2].name, made.weight_scale_2.reshape(()))
        return int((~made.lossless_mask).sum())


def check_castable(family: Family) -> None:
    """CheckpointError unless the family is MXFP4 whose blocks are 16 whole bytes."""
    if family.kind != "mxfp4" or family.shape[-1] % 32:
        raise CheckpointError(
            f"K = {family.shape[-1]} of a {family.kind} weight; the exact cast needs MXFP4 with K "
            "a multiple of 32. Convert it with --to bf16 and quantize.",
            file=shown(family.weight.file),
            tensor=shown(family.weight.name),
        )
