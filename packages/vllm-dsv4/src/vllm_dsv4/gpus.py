"""Which GPUs a model is to run on: asked of nvidia-smi, or given by hand.

Nothing here initializes CUDA: a server that is refused has not touched a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from .errors import PlanError

Family = Literal["hopper", "blackwell"]

GIB: Final = 2**30
#: What CUDA reports as total memory (torch.cuda.mem_get_info), which is less than is printed on
#: the box. H200: measured; H100 and B200: PyTorch's own messages ("a total capacity of ...").
MEMORY: Final[Mapping[str, float]] = {"H100": 79.1, "H200": 139.8, "B200": 178.35}

_FAMILIES: Final[Mapping[int, Family]] = {9: "hopper", 10: "blackwell"}
_GIVEN: Final = re.compile(r"([A-Za-z]+[0-9]+[A-Za-z]*):([0-9]+)(?::([0-9]+(?:\.[0-9]+)?))?")
_QUERY: Final = ("index", "uuid", "name", "memory.total", "memory.reserved", "compute_cap")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one or several equal nodes.

    kind: a name for messages. family: what vLLM's kernels go by, Hopper (compute capability 9.x)
    or Blackwell of the data center (10.x). count: on each node. memory: bytes of one GPU.
    """

    kind: str
    family: Family
    count: int
    memory: int
    nodes: int = 1

    @property
    def total(self) -> int:
        """GPUs of all nodes."""
        return self.count * self.nodes

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, by the names of NVIDIA's products."""
        if self.family == "hopper":
            return (9, 0)
        return (10, 3) if re.fullmatch(r"G?B3[0-9]+", self.kind) else (10, 0)

    def __str__(self) -> str:
        here = f"{self.count} x {self.kind}"
        return here if self.nodes == 1 else f"{self.nodes} nodes of {here}"


def parse_gpus(given: str, nodes: int = 1) -> Gpus:
    """``B200:8``, or with the memory of one GPU in GiB where the kind is not known: ``B300:8:268``.

    Raises PlanError for another spelling, or an unknown kind without its memory.
    """
    found = _GIVEN.fullmatch(given)
    if found is None or int(found[2]) < 1:
        raise PlanError(f"GPUs are given as KIND:COUNT, such as B200:8 or H200:8; found {given!r}.")
    if nodes < 1:
        raise PlanError(f"{nodes} nodes; at least one is needed.")
    kind = found[1].upper()
    gib = float(found[3]) if found[3] else MEMORY.get(kind)
    if gib is None:
        raise PlanError(
            f"the memory of {kind} is not known here (known: {', '.join(MEMORY)}); add it in GiB, "
            f"as CUDA reports it: {given}:GIB."
        )
    if not gib:
        raise PlanError(f"{given!r} gives each GPU no memory; GIB is what CUDA reports, in GiB.")
    return Gpus(kind, _family_of(kind), int(found[2]), int(gib * GIB), nodes)


def detect_gpus(nodes: int = 1) -> Gpus:
    """The GPUs of this machine, those of CUDA_VISIBLE_DEVICES if it is set; all nodes alike.

    Raises PlanError where there is no driver, no GPU that vLLM runs DeepSeek-V4 on, or a mixture.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise PlanError(
            "there is no nvidia-smi here to ask about GPUs; say what there is, such as "
            "--gpus B200:8."
        )
    asked = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    result = subprocess.run(asked, capture_output=True, text=True, check=False)
    if result.returncode:
        message = (result.stderr or result.stdout).strip().splitlines()
        raise PlanError(
            f"nvidia-smi failed: {message[0] if message else result.returncode}. Repair the "
            "driver, or say what there is, such as --gpus B200:8."
        )
    return read_gpus(result.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"), nodes)


def read_gpus(table: str, visible: str | None, nodes: int = 1) -> Gpus:
    """The answer of nvidia-smi to the columns above; ``visible`` as CUDA_VISIBLE_DEVICES.

    Raises PlanError as `detect_gpus` does.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line]
    if visible is not None:
        rows = _visible(rows, visible)
    if not rows:
        raise PlanError(
            "no GPU is visible. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or say what there is, "
            "such as --gpus B200:8."
        )
    if len(names := sorted({row[2] for row in rows})) > 1:
        raise PlanError(
            f"GPUs of different kinds: {', '.join(names)}. Choose one kind with "
            "CUDA_VISIBLE_DEVICES."
        )
    name, total, reserved, capability = rows[0][2:6]
    family = _FAMILIES.get(int(capability.partition(".")[0]))
    if family is None:
        raise PlanError(
            f"{name} has compute capability {capability}; DeepSeek-V4 runs on 9.x (Hopper) and "
            "10.x (Blackwell of the data center) in this vLLM."
        )
    mib = int(total) - (int(reserved) if reserved.isdigit() else 0)
    return Gpus(_kind_of(name), family, len(rows), mib * 2**20, nodes)


def _visible(rows: list[list[str]], visible: str) -> list[list[str]]:
    """By index, or by the beginning of a UUID; CUDA stops at the first that does not exist."""
    chosen = []
    for wanted in (word.strip() for word in visible.split(",")):
        if wanted.startswith("MIG-"):
            raise PlanError(
                f"CUDA_VISIBLE_DEVICES names {wanted}, a part of a GPU: give whole GPUs."
            )
        found = [r for r in rows if r[0] == wanted or (wanted and r[1].startswith(wanted))]
        if len(found) != 1:
            break
        chosen += found
    return chosen


def _kind_of(name: str) -> str:
    """``NVIDIA H200 141GB HBM3`` is an H200."""
    found = re.search(r"\b(G?[BH][0-9]{2,3})\b", name)
    return found[1] if found else name


def _family_of(kind: str) -> Family:
    if re.fullmatch(r"G?B[0-9]+", kind):
        return "blackwell"
    if re.fullmatch(r"G?H[0-9]+", kind):
        return "hopper"
    raise PlanError(
        f"{kind} is neither Hopper (H100, H200, ...) nor Blackwell of the data center (B200, ...): "
        "DeepSeek-V4 does not run there in this vLLM."
    )
