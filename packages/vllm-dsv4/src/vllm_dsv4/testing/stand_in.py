"""The platform class itself; imported by vLLM only, after `platform.activate`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability


class _Inert:
    """A stream or an event without a device."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def record(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def wait(self, *arguments: Any, **keywords: Any) -> None:
        pass


class StandInPlatform(NonNvmlCudaPlatform):
    """An SM100 machine of eight GPUs whose tensors live on the CPU."""

    device_type = "cpu"
    device_name = "cuda"
    dispatch_key = "CPU"
    capability = DeviceCapability(10, 0)

    def __init__(self) -> None:
        super().__init__()
        for name in ("Stream", "Event"):
            setattr(torch.cuda, name, _Inert)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return cls.capability

    @classmethod
    def has_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        wanted = capability if isinstance(capability, int) else 10 * capability[0] + capability[1]
        return cls.capability.to_int() >= wanted

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "stand-in for SM100"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 180 << 30

    @classmethod
    def device_count(cls) -> int:
        return 8

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 148

    @classmethod
    def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
        return True
