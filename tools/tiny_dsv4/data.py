"""The text: the sources of Python's standard library, one token per byte.

Every machine with Python has it. Its licence (PSF-2.0) allows this use; the list of modules and
a hash over all of them go into the training record.
"""

import hashlib
import sysconfig
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

BOS, EOS, PAD = 256, 257, 258  # ids 0..255 are the bytes themselves
VOCAB_SIZE = 512  # padded, as the kernels want it; ids from 259 on never occur

# Character tables would crowd out the rest, and _sysconfigdata describes the machine.
_SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "encodings", "site-packages"}
_SKIPPED_PREFIX = "_sysconfigdata"

HELD_OUT_ONE_IN = 16
EXCERPT_BYTES = 8192

Side = Literal["training", "validation", "evaluation"]
#: What `side_of` decides, for the training record.
RULES = {
    "validation": f"sha256(path)[0] % {HELD_OUT_ONE_IN} == 0 and sha256(path)[1] % 2 == 0",
    "evaluation": f"sha256(path)[0] % {HELD_OUT_ONE_IN} == 0 and sha256(path)[1] % 2 == 1",
}


def standard_library() -> dict[str, bytes]:
    """Return the sources of the running Python, relative path -> bytes, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        folders = set(name.parts[:-1])
        if folders & _SKIPPED_FOLDERS or any(f.startswith("config-") for f in folders):
            continue
        if name.name.startswith(_SKIPPED_PREFIX):
            continue
        modules[name.as_posix()] = path.read_bytes()
    return modules


def side_of(name: str) -> Side:
    """Decide by the path's SHA-256 alone, so that the split is the same on every Python.

    Training never reads the other two sides. "validation" is for choosing (settle_tiny_dsv4.py
    does), "evaluation" for the figures that are reported, and for nothing else.
    """
    first, second = hashlib.sha256(name.encode()).digest()[:2]
    if first % HELD_OUT_ONE_IN:
        return "training"
    return "evaluation" if second % 2 else "validation"


def excerpts(modules: dict[str, bytes], side: Side) -> dict[str, bytes]:
    """Return the whole EXCERPT_BYTES pieces of that side's ASCII modules, name+offset -> bytes.

    The first piece of every module in order of hash, then the second of those that have one, and
    so on: any first few are a fair sample. Equal lengths, so that no context window of the
    evaluation straddles two modules.
    """
    names = [
        name
        for name, text in modules.items()
        if side_of(name) == side
        and "test" not in name  # not installed everywhere
        and text.isascii()
    ]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    longest = max((len(modules[name]) for name in names), default=0)
    return {
        f"{name}+{start}" if start else name: modules[name][start : start + EXCERPT_BYTES]
        for start in range(0, longest, EXCERPT_BYTES)
        for name in names
        if len(modules[name]) >= start + EXCERPT_BYTES
    }


def training_stream(modules: dict[str, bytes]) -> Tensor:
    """Return the training side as one int16 tensor: BOS, bytes, EOS, BOS, bytes, ..."""
    parts = []
    for name, text in modules.items():
        if side_of(name) == "training":
            body = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
            parts += [torch.tensor([BOS]), body.long(), torch.tensor([EOS])]
    return torch.cat(parts).to(torch.int16)


def digest(modules: dict[str, bytes]) -> str:
    """Return one SHA-256 over all names and contents."""
    total = hashlib.sha256()
    for name, text in modules.items():
        total.update(f"{name}\0{len(text)}\0".encode() + text)
    return total.hexdigest()


class Batches:
    """Random windows of the stream, on the stream's device, from a seeded generator."""

    def __init__(self, stream: Tensor, seed: int) -> None:
        self.stream = stream
        self.random = torch.Generator().manual_seed(seed)

    def _below(self, limit: int, count: int = 1) -> Tensor:
        return torch.randint(limit, (count,), generator=self.random)

    def draw(self, rows: int, length: int, repeats: int) -> Tensor:
        """Return int64 ``[rows, length]``.

        In the first ``repeats`` rows a quarter of the window occurs twice, at least a quarter
        apart: something only attention far beyond the sliding window can predict.
        """
        start = self._below(self.stream.numel() - length, rows).to(self.stream.device)
        offsets = torch.arange(length, device=self.stream.device)
        ids = self.stream[start[:, None] + offsets].long()
        quarter = length // 4
        source = int(self._below(quarter))
        target = 2 * quarter + int(self._below(quarter))
        ids[:repeats, target : target + quarter] = ids[:repeats, source : source + quarter]
        return ids
