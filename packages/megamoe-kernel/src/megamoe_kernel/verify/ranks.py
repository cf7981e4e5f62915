"""Several ranks, one process for each GPU of this host: symmetric memory, dispatch and combine.

The parent starts the processes; each runs this module and leaves its findings in a file.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from ..activations import quantize_tokens
from ..api import ACTIVATIONS, LAYER_KERNELS, prepare_inputs
from ..buffer import get_symm_buffer_for_nvfp4_mega_moe
from ..errors import BackendError
from ..jit.targets import Target
from ..models import MoEShape
from ..reference import Activation, RankTokens, mega_moe
from .cases import random_weights, spread
from .checks import BOUNDS, SWIGLU_LIMIT, Load, public_layer, scalar_layer
from .machine import LAYOUTS, required_target
from .report import Finding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LAUNCHES = 1000
_MOST_TOKENS = 40
_SECONDS = 300
_GRACE_SECONDS = 10
_COMMAND = [sys.executable, "-m", "megamoe_kernel.verify.ranks"]
_SEED = 3


def check_gpus(num_ranks: int) -> None:
    """Refuse more ranks than this process sees GPUs."""
    count = torch.cuda.device_count()
    if not 1 <= num_ranks <= count:
        raise BackendError(
            f"the number of ranks is {num_ranks}, expected 1 to {count}: the GPUs that this "
            "process sees"
        )


def check_ranks(num_ranks: int, launches: int = LAUNCHES) -> list[Finding]:
    """The layer, and the one without tensor cores, over the first GPUs of this host.

    Every launch has unequal numbers of tokens, some ranks none; all use one buffer. Findings of
    each rank: of its buffers, and of each way to compute the layer.
    """
    with tempfile.TemporaryDirectory() as scratch:
        outputs = run_processes(num_ranks, [*_COMMAND, str(launches), scratch], Path(scratch))
        files = [Path(scratch, f"{rank_idx}.json") for rank_idx in range(num_ranks)]
        findings = [Finding(**row) for path in files if path.exists() for row in _read(path)]
        lost = [rank_idx for rank_idx, path in enumerate(files) if not path.exists()]
    for rank_idx in lost:
        note = outputs[rank_idx].strip()[-2000:] or "it was ended: too slow, or another rank failed"
        findings.append(Finding("ranks", f"rank {rank_idx} of {num_ranks}", "failed", note=note))
    return findings


def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def run_processes(num_ranks: int, command: list[str], folder: Path) -> list[str]:
    """Run a command as every rank, to its end, and return what each one printed.

    The command's processes find each other by `join`. When one fails, the others have a few seconds
    to say so too; after five minutes all are ended. folder: for what they print.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes, logs = [], []
    for rank_idx in range(num_ranks):
        environment = {
            **os.environ,
            "RANK": str(rank_idx),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            # Not installed, the packages are where this process found them.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        logs.append((folder / f"{rank_idx}.log").open("w+"))
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=logs[-1], stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        )  # fmt: skip
    end = time.monotonic() + _SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()
    texts = []
    for log in logs:
        log.seek(0)
        texts.append(log.read())
        log.close()
    return texts


def join() -> tuple[ProcessGroup, torch.device]:
    """In a process that run_processes started: the group of all ranks, and this one's GPU."""
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    return group, device


def main(launches: int, folder: Path) -> None:
    """One rank."""
    import torch.distributed as dist

    group, device = join()
    findings = [_check_buffers(group, device)]
    for way in _ways(required_target()):
        findings.append(_check_launches(group, device, *way, launches))
    dist.destroy_process_group()
    path = folder / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps([asdict(finding) for finding in findings]))


def _ways(target: Target) -> list[tuple[str, Load, Activation]]:
    """The ways to compute the layer that this GPU has."""
    ways: list[tuple[str, Load, Activation]] = [
        ("without tensor cores", scalar_layer, activation) for activation in get_args(Activation)
    ]
    arch = LAYOUTS[target]
    if arch in LAYER_KERNELS:
        ways.append(("layer", public_layer(arch), ACTIVATIONS[arch]))
    return ways


def _shape(num_ranks: int) -> MoEShape:
    return MoEShape(2 * num_ranks, 2, 512, 256)


def _sizes(num_ranks: int) -> dict[str, Any]:
    shape = _shape(num_ranks)
    return {
        "num_experts": shape.num_experts, "num_max_tokens_per_rank": _MOST_TOKENS,
        "num_topk": shape.num_topk, "hidden": shape.hidden, "intermediate": shape.intermediate,
    }  # fmt: skip


def _check_buffers(group: ProcessGroup, device: torch.device) -> Finding:
    """Allocated and given back, several times; two ranks that name one GPU are refused on all."""
    sizes, num_ranks = _sizes(group.size()), group.size()
    refused = ""
    try:
        get_symm_buffer_for_nvfp4_mega_moe(group, **sizes, device="cuda:0")
    except BackendError as error:
        refused = str(error)
    right = "on the same GPU" in refused
    for _ in range(3):
        buffer = get_symm_buffer_for_nvfp4_mega_moe(group, **sizes, device=device)
        right &= len(set(buffer.peers)) == num_ranks and bool((buffer.topk_idx == -1).all())
        buffer.destroy()
        buffer.destroy()
    name = f"rank {group.rank()} of {num_ranks}, symmetric buffers"
    return Finding("ranks", name, "passed" if right else "failed")


def _check_launches(
    group: ProcessGroup,
    device: torch.device,
    way: str,
    load: Load,
    activation: Activation,
    launches: int,
) -> Finding:
    rank_idx, num_ranks = group.rank(), group.size()
    buffer = get_symm_buffer_for_nvfp4_mega_moe(
        group, **_sizes(num_ranks), activation=activation, device=device, ring_rows=512
    )
    # All ranks draw the same weights and tokens, on the CPU.
    w13, w2 = (w.to(device) for w in random_weights(_shape(num_ranks), "cpu", _SEED))
    local = buffer.num_experts_per_rank
    mine = slice(rank_idx * local, (rank_idx + 1) * local)
    run = load(w13.select(mine), w2.select(mine))
    cases = []
    for number, counts in enumerate(_token_counts(num_ranks)):
        inputs = list(_inputs(counts, num_ranks, number, device))
        ranks = [
            RankTokens(quantize_tokens(x) if activation == "nvfp4" else x, ids, weights)
            for x, ids, weights in inputs
        ]
        expected = mega_moe(ranks, w13, w2, activation=activation, swiglu_limit=SWIGLU_LIMIT)
        cases.append((*inputs[rank_idx], expected[rank_idx]))
    worst = torch.zeros((), dtype=torch.float64, device=device)
    for launch in range(launches):
        x, ids, weights, wanted = cases[launch % len(cases)]
        y = torch.full_like(x, float("nan"))
        prepare_inputs(x, buffer, topk_idx=ids, topk_weights=weights)
        run(y, buffer)
        if x.shape[0]:
            error = (y.double() - wanted.double()).norm() / wanted.double().norm()
            worst = torch.maximum(worst, error.nan_to_num(nan=torch.inf))
    failure, error, bound = buffer.failure(), float(worst), BOUNDS[activation]
    buffer.destroy()
    name = f"rank {rank_idx} of {num_ranks}, {way}, {activation}, {launches} launches"
    if failure is not None or error == float("inf"):
        note = str(failure or "values that are not finite")
        return Finding("ranks", name, "failed", None, bound, note)
    return Finding("ranks", name, "passed" if error <= bound else "failed", error, bound)


def _token_counts(num_ranks: int) -> list[list[int]]:
    """Unequal; one rank without tokens; one rank with any; the most for all."""
    return [
        [(33 + 7 * rank_idx) % (_MOST_TOKENS + 1) for rank_idx in range(num_ranks)],
        [0, *[_MOST_TOKENS] * (num_ranks - 1)],
        [1, *[0] * (num_ranks - 1)],
        [_MOST_TOKENS] * num_ranks,
    ]


def _inputs(
    counts: Sequence[int], num_ranks: int, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(x, topk_idx, topk_weights) of every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = _shape(num_ranks)
    for count in counts:
        x = torch.randn(count, shape.hidden, generator=generator).bfloat16()
        ids = spread(shape, count, generator)
        weights = torch.rand(count, shape.num_topk, generator=generator) + 0.1
        yield x.to(device), ids.to(device), weights.to(device)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
