"""Whether ranks can reach each other's memory over NVLink: one host, or one NVLink fabric.

NVML answers, by dlopen; what it cannot tell is left to the allocation, which then fails by itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from .buffer_sizes import ACROSS_NODES
from .errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a rank's GPU is. host: the boot's id. fabric: NVLink cluster and clique, if any."""

    host: str
    device: str
    fabric: str | None


def check_one_domain(places: Sequence[Place]) -> None:
    """Refuse ranks on several hosts unless they share one NVLink fabric."""
    first = places[0]
    for rank_idx, place in enumerate(places):
        one_fabric = place.fabric is not None and place.fabric == first.fabric
        if place.host != first.host and not one_fabric:
            raise BackendError(
                f"rank {rank_idx} is outside the NVLink domain of rank 0 (another host, and no "
                f"NVLink fabric that both are in); expert parallelism is limited to one domain: "
                f"{ACROSS_NODES}"
            )
    devices = [place.device for place in places]
    for rank_idx, device in enumerate(devices):
        if devices.index(device) != rank_idx:
            raise BackendError(
                f"ranks {devices.index(device)} and {rank_idx} are on the same GPU; each rank "
                "needs its own"
            )


def agree_on_domain(group: ProcessGroup, device: torch.device) -> None:
    """Collective: all ranks go on, or all raise the same BackendError."""
    library = _nvml()
    places: list[Place] = _gather(group, _place(library, device))
    check_one_domain(places)
    mine = places[group.rank()]
    unlinked = [
        rank_idx
        for rank_idx, other in enumerate(places)
        if other.host == mine.host and _linked(library, mine.device, other.device) is False
    ]
    for rank_idx, others in enumerate(_gather(group, unlinked)):
        if others:
            raise BackendError(
                f"no NVLink between the GPUs of ranks {rank_idx} and {others[0]}; expert "
                f"parallelism is limited to one NVLink domain: {ACROSS_NODES}"
            )


def meet(group: ProcessGroup) -> None:
    """Wait for all ranks; with any backend, and without NCCL's question for a device."""
    _gather(group, 0)


def _gather(group: ProcessGroup, mine: T) -> list[T]:
    gathered: list[T | None] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, mine, group=group)
    return [item for item in gathered if item is not None]


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _handle(library: ctypes.CDLL, uuid: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    found = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle))
    return handle if found == 0 else None


def _place(library: ctypes.CDLL | None, device: torch.device) -> Place:
    host = _BOOT_ID.read_text().strip()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if library is None or (handle := _handle(library, uuid)) is None:
        return Place(host, uuid, None)
    info = _FabricInfo()
    query = getattr(library, "nvmlDeviceGetGpuFabricInfo", None)  # drivers before 525 lack it
    if query is None or query(handle, ctypes.byref(info)) != 0:
        return Place(host, uuid, None)
    cluster = bytes(info.cluster)
    if info.state != _FABRIC_COMPLETED or info.status != 0 or not any(cluster):
        return Place(host, uuid, None)
    return Place(host, uuid, f"{cluster.hex()}-{info.clique}")


def _linked(library: ctypes.CDLL | None, mine: str, other: str) -> bool | None:
    """Whether two GPUs of this host have NVLink; None if NVML does not say."""
    if library is None or mine == other:
        return None
    first, second = _handle(library, mine), _handle(library, other)
    status = ctypes.c_int()
    if first is None or second is None:
        return None
    if library.nvmlDeviceGetP2PStatus(first, second, _P2P_NVLINK, ctypes.byref(status)) != 0:
        return None
    return status.value == 0
