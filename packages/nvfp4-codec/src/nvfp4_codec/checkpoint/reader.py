"""Open a checkpoint, one file or a sharded folder, and read one tensor at a time.

Opening reads headers only. Data is read by ``pread`` straight into the memory of the
result: a failing disk or a truncated file is then an exception, where a memory map would
kill the process with SIGBUS. Nothing here imports torch until a torch tensor is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .files import inside, open_regular, read_small, strict_json
from .header import Header, TensorSpec, byte_size, read_header, shown

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
_MAX_INDEX_BYTES: Final = 1 << 28
_READ_CHUNK: Final = 1 << 30  # Linux returns at most 2 GiB - 4 KiB per call


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: ``file`` relative to the checkpoint, ``offset`` from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int

    @property
    def spec(self) -> TensorSpec:
        """The tensor as a header describes it, without its place."""
        return TensorSpec(self.name, self.dtype, self.shape)


class Checkpoint:
    """A read-only checkpoint whose headers have been checked; a context manager."""

    def __init__(
        self,
        root: Path,
        files: Mapping[str, Path],
        index: Mapping[str, str] | None = None,
        *,
        is_folder: bool = True,
    ) -> None:
        self.root = root
        self.index = index
        self.is_folder = is_folder
        self.paths = dict(files)
        self.headers: dict[str, Header] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._fds: dict[str, int] = {}
        try:
            for file, path in self.paths.items():
                self._add(file, path)
            if index is not None:
                self._check_index(index)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Opens a .safetensors file, or a folder with an index or a single such file.

        Raises CheckpointError for a missing, malformed or inconsistent checkpoint.
        """
        root = Path(path)
        if not root.exists():
            raise CheckpointError(
                "does not exist; give a .safetensors file or a folder with some.",
                file=shown(str(root)),
            )
        if not root.is_dir():
            return cls(root.parent, {root.name: root}, is_folder=False)
        chosen = index_name(root)
        if chosen is not None:
            index = read_index(inside(root, chosen, str(root)))
            files = sorted(set(index.values()))
            return cls(root, {file: inside(root, file, chosen) for file in files}, index)
        found = sorted(root.glob("*.safetensors"))
        if root / SINGLE_NAME in found:
            found = [root / SINGLE_NAME]
        if len(found) != 1:
            raise CheckpointError(
                f"{len(found)} .safetensors files and no {INDEX_NAME}; expected the index, "
                f"or exactly one file. Give the path of one file, or add the index.",
                file=shown(str(root)),
            )
        return cls(root, {found[0].name: inside(root, found[0].name, str(root))})

    def _add(self, file: str, path: Path) -> None:
        fd = open_regular(path, file)
        self._fds[file] = fd
        try:
            header = read_header(fd, shown(file))
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}.", file=shown(file)) from None
        self.headers[file] = header
        for entry in header.entries:
            other = self.tensors.get(entry.name)
            if other is not None:
                raise CheckpointError(
                    f"is also in {shown(other.file)}; a name may occur once. Remove one of them.",
                    file=shown(file),
                    tensor=shown(entry.name),
                )
            self.tensors[entry.name] = TensorInfo(
                entry.name,
                entry.dtype,
                entry.shape,
                file,
                header.data_offset + entry.begin,
                entry.end - entry.begin,
            )

    def _check_index(self, index: Mapping[str, str]) -> None:
        for name, file in index.items():
            info = self.tensors.get(name)
            if info is None or info.file != file:
                where = "in no file" if info is None else f"in {shown(info.file)}"
                raise CheckpointError(
                    f"the index places it here, but it is {where}. "
                    "Index and files belong to different checkpoints: fetch both again.",
                    file=shown(file),
                    tensor=shown(name),
                )
        extra = sorted(self.tensors.keys() - index.keys())
        if extra:
            raise CheckpointError(
                f"{len(extra)} tensors of the files are not in the index, the first is this one. "
                "Fetch the index again, or write it anew.",
                file=shown(self.tensors[extra[0]].file),
                tensor=shown(extra[0]),
            )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; reading afterwards is an error."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def __iter__(self) -> Iterator[TensorInfo]:
        return iter(self.tensors.values())

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """The tensor's entry; CheckpointError if there is none of that name."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"not among the {len(self.tensors)} tensors; `nvfp4 inspect` lists them.",
                file=shown(str(self.root)),
                tensor=shown(name),
            )
        return info

    def fd(self, file: str) -> int:
        """The open descriptor of one of ``files``, for copying without a detour."""
        return self._fds[file]

    def read(self, name: str) -> Bytes:
        """All bytes of a tensor, as a flat uint8 array that owns its memory."""
        info = self.info(name)
        data: Bytes = np.empty(info.nbytes, dtype=np.uint8)
        self.read_into(name, data)
        return data

    def read_into(self, name: str, out: Bytes, start: int = 0) -> None:
        """Fills ``out`` (flat uint8) with the tensor's bytes from ``start`` on."""
        info = self.info(name)
        if start < 0 or start + out.nbytes > info.nbytes:
            raise CheckpointError(
                f"bytes {start}..{start + out.nbytes} of {info.nbytes} were asked for.",
                file=shown(info.file),
                tensor=shown(name),
            )
        view = out.data
        done = 0
        while done < len(view):
            try:
                got = os.preadv(
                    self._fds[info.file],
                    [view[done : done + _READ_CHUNK]],
                    info.offset + start + done,
                )
            except OSError as error:
                raise self._unreadable(info, error.strerror or "input/output error") from None
            if got == 0:
                raise self._unreadable(info, "the file ends early; it shrank after it was opened")
            done += got

    def _unreadable(self, info: TensorInfo, why: str) -> CheckpointError:
        return CheckpointError(
            f"reading failed: {why}. Check the disk, or fetch the file again.",
            file=shown(info.file),
            tensor=shown(info.name),
        )

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, read straight into its memory; sub-byte dtypes come as uint8."""
        import torch

        info = self.info(name)
        data = torch.empty(info.nbytes, dtype=torch.uint8)
        self.read_into(name, data.numpy())
        return as_torch(data, info.dtype, info.shape)


def as_torch(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Gives flat uint8 memory the dtype and shape of a header entry, without a copy."""
    import torch

    names = {
        "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
        "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "I16": torch.int16, "U16": torch.uint16,
        "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32,
        "F32": torch.float32, "C64": torch.complex64, "F64": torch.float64,
        "I64": torch.int64, "U64": torch.uint64,
    }  # fmt: skip
    if dtype not in names:  # F4, F6: torch has no dense dtype; the last dimension packs
        last = (byte_size(dtype, shape[-1:]),) if shape else ()
        packed = (*shape[:-1], *last)
        return data.reshape(packed if byte_size("U8", packed) == data.numel() else (-1,))
    return data.view(names[dtype]).reshape(shape)


def index_name(root: Path) -> str | None:
    """The folder's index: the one of the usual name, else the only one, else None."""
    names = sorted(path.name for path in root.glob("*.safetensors.index.json"))
    if INDEX_NAME in names:
        return INDEX_NAME
    return names[0] if len(names) == 1 else None


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name from an index.json; CheckpointError if it is malformed."""
    weight_map: dict[str, str] = read_index_file(path)["weight_map"]
    return weight_map


def read_index_file(path: Path) -> dict[str, Any]:
    """The whole of an index.json, its weight_map checked; CheckpointError if it is malformed."""
    file = path.name
    document = strict_json(read_small(path, _MAX_INDEX_BYTES, file), file)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            'no weight_map; expected {"weight_map": {tensor: file}}. Fetch it again.', file=file
        )
    for name, target in weight_map.items():
        if not isinstance(target, str):
            raise CheckpointError(
                f"the file is {type(target).__name__}, expected a string.",
                file=file,
                tensor=shown(name),
            )
    return document
