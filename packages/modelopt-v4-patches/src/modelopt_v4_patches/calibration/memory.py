"""What a calibration needs of memory, known from headers and config.json before it starts."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from nvfp4_codec.checkpoint.reader import Checkpoint
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig

from ..errors import CalibrationError

logger = logging.getLogger(__name__)

GIB: Final = 1 << 30
#: Residual streams [tokens, streams, hidden] in fp32 that live at once, and bytes for each score of
#: attention: forwards of 1 x 512, 8 x 512 and 1 x 4096 tokens were measured to stay below.
_STREAM_COPIES: Final = 24
_SCORE_BYTES: Final = 32
#: What libraries take before anything is loaded: CUDA's context and kernels, or Python alone.
_RUNTIME: Final = {"gpu": 2 * GIB, "cpu": GIB // 2}


@dataclass(frozen=True)
class Need:
    """Bytes that a calibration needs.

    weights: all tensors that transformers loads (it has no MTP blocks). working: activations of
    one forward and, where a layer's experts are stacked while loading or fetched from the CPU,
    those experts once more. cached: a layer's inputs and outputs for all samples (layerwise).
    """

    weights: int
    working: int
    cached: int


@dataclass(frozen=True)
class Room:
    """Bytes that may hold weights, and bytes kept free to work in, by device."""

    kind: Literal["gpu", "cpu"]
    budgets: tuple[int, ...]  # one for each GPU, then the CPU
    headroom: int  # of the device that computes


def measure_need(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    batch_size: int,
    sequence_length: int,
    layerwise_samples: int = 0,
) -> Need:
    """What loading ``checkpoint`` and one forward of ``batch_size`` sequences take."""
    weights = sum(info.nbytes for info in checkpoint if not info.name.startswith("mtp."))
    d = config.dimensions
    tokens = batch_size * sequence_length
    streams = tokens * d["streams"] * d["hidden"]
    scores = d["heads"] * batch_size * sequence_length * sequence_length
    logits = tokens * d["vocab"] * 6  # BF16, and fp32 while they are cast
    experts = config.num_experts * 3 * d["inner"] * d["hidden"] * 2
    working = streams * 4 * _STREAM_COPIES + scores * _SCORE_BYTES + logits + experts
    cached = 2 * layerwise_samples * sequence_length * d["streams"] * d["hidden"] * 2
    return Need(weights, working, cached)


def measure_room(device: Literal["auto", "cpu"], fraction: float) -> Room:
    """What this machine has: ``fraction`` of each device for weights, the rest to work in."""
    ram = available_ram()
    gpus = free_gpu_memory() if device == "auto" else []
    if not gpus:
        return Room("cpu", (int(ram * fraction),), int(ram * (1 - fraction)) - _RUNTIME["cpu"])
    budgets = (*(int(free * fraction) for free in gpus), int(ram * fraction))
    return Room("gpu", budgets, int(min(gpus) * (1 - fraction)) - _RUNTIME["gpu"])


def check_memory(need: Need, room: Room, fraction: float) -> None:
    """Says what is needed and what is there; CalibrationError if it cannot fit."""
    places = [f"GPU {index} {_gib(budget)}" for index, budget in enumerate(room.budgets[:-1])]
    places.append(f"CPU {_gib(room.budgets[-1])}")
    weights = (
        f"the weights need {_gib(need.weights)}, at memory fraction {fraction} there is room for "
        f"{_gib(sum(room.budgets))} ({', '.join(places)})"
    )
    forward = (
        f"a forward needs {_gib(need.working + need.cached)}, "
        f"{_gib(max(room.headroom, 0))} are left on the {room.kind.upper()} that runs it"
    )
    logger.info("%s; %s", weights, forward)
    problems = [weights] if need.weights > sum(room.budgets) else []
    if need.working + need.cached > room.headroom:
        problems.append(forward)
    if problems:
        raise CalibrationError(
            "not enough memory to calibrate: " + "; ".join(problems) + ". Use more or larger "
            "devices, another --memory-fraction, fewer samples at once (--batch-size) or a shorter "
            "--sequence-length; with --modelopt-repo, modelopt 0.46 and later can keep weights on "
            "disk (--hf-ptq --offload_folder FOLDER)."
        )


def max_memory(room: Room) -> dict[int | str, int]:
    """The budgets as accelerate's ``max_memory``."""
    *gpus, cpu = room.budgets
    return {**dict(enumerate(gpus)), "cpu": cpu}


def free_gpu_memory() -> list[int]:
    """Free bytes of each GPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]


def available_ram() -> int:
    """Bytes of memory that can be had without swapping, within the container's limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit in _lines("/sys/fs/cgroup/memory.max"):
        if limit.strip().isdigit():  # else "max"
            available = min(available, int(limit))
    return available


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.1f} MiB"
