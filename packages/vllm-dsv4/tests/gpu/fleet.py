"""Engines side by side: each is a program of its own, and several fit on one GPU.

Starting vLLM takes a minute of one core and little of the GPU, so what the tests will ask for is
started ahead of them, in order, and every test takes the answers of the engines that it names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import texts
from .agreement import Logprobs

ENGINE = Path(__file__).with_name("engine.py")
NEW_TOKENS = 64
WINDOWS = 4
#: Seconds for one engine. With empty caches, kernels take up to four minutes to compile.
PATIENCE = 500

#: Small enough for several engines on one GPU; nothing is measured of the GPU's memory, which the
#: others change meanwhile.
LLM: Mapping[str, Any] = {
    "skip_tokenizer_init": True, "enforce_eager": True, "block_size": 256, "max_model_len": 8192,
    "max_num_batched_tokens": 8192, "max_num_seqs": 8, "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30, "max_logprobs": -1,
    "kernel_config": {"enable_jit_warmup": False}, "disable_log_stats": True,
}  # fmt: skip
#: No downloads, no builds of kernels that are not used, functions as arguments of apply_model.
ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}  # fmt: skip
STOCK: Mapping[str, str] = {"VLLM_PLUGINS": ""}
#: The extra arguments of two ranks; the custom all-reduce would exchange memory handles.
TWO = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
#: vLLM's layer for fused kernels, from which a moe_kernel gets its tokens.
MEGA = {"moe_backend": "deep_gemm_mega_moe", "enable_expert_parallel": True}
#: The options with which megamoe-kernel takes over the routed experts.
MEGAMOE = {"moe_kernel": "megamoe"}


@dataclass(frozen=True)
class Job:
    """What to serve, how, and what to ask.

    checkpoint: a name of variants.py, ``official`` or ``prepared``. prompts: all lengths with the
    long one, or none. alone: the prompts again, one after another.
    """

    checkpoint: str
    llm: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    prompts: str = "all"
    windows: int = 0
    alone: bool = False
    gpus: int = 1


#: By name; the order is that of importance.
JOBS: Mapping[str, Job] = {
    "heavy": Job("heavy"),
    "heavy-hf": Job("heavy-hf", options={"verify_load": True}),
    "full": Job("full", windows=WINDOWS, alone=True),
    "swapped": Job("swapped"),
    "experts": Job("experts", windows=WINDOWS),
    "official": Job("official", windows=WINDOWS),
    "prepared": Job("prepared", environment=STOCK, windows=WINDOWS),
    "heavy-wo_a-bf16": Job("heavy", options={"wo_a_dtype": "bf16"}),
    "graphs": Job("full", {"enforce_eager": False}, alone=True),
    "marlin": Job("full", {"moe_backend": "marlin"}),
    "subnormal": Job("subnormal", {"moe_backend": "humming"}),
    "marlin-subnormal": Job("subnormal", {"moe_backend": "marlin"}),
    "mtp": Job(
        "full",
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
         "disable_log_stats": False},
        prompts="none",
    ),
    "megamoe": Job("full", MEGA, options=MEGAMOE, alone=True),
    "megamoe-graphs": Job("full", {**MEGA, "enforce_eager": False}, options=MEGAMOE, alone=True),
    "mega": Job("full", MEGA, prompts="none"),
    "stock": Job("full", environment=STOCK, prompts="none"),
    "tp2": Job("wide", TWO, gpus=2),
    "ep2": Job("wide", {**TWO, "enable_expert_parallel": True}, gpus=2),
    "tp2-narrow": Job("full", TWO, gpus=2),
    "megamoe-ep2": Job("wide", {**TWO, **MEGA}, options=MEGAMOE, gpus=2),
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """What came of a job; ``log`` is the output of all its processes."""

    name: str
    code: int
    log: str
    seconds: float
    arrays: Mapping[str, NDArray[Any]]

    @property
    def about(self) -> dict[str, Any]:
        """What was built: ``built`` by rank, and seconds; fails with the log's end otherwise."""
        assert self.code == 0, f"{self.name} ended with {self.code}:\n{self.log[-4000:]}"
        about: dict[str, Any] = json.loads(str(self.arrays["about"]))
        return about

    @property
    def logprobs(self) -> list[Logprobs]:
        """Of each prompt and what was generated after it, ``[tokens - 1, vocabulary]``."""
        assert self.about
        count = sum(name.startswith("logprobs") for name in self.arrays)
        return [self.arrays[f"logprobs{i}"] for i in range(count)]

    @property
    def sequences(self) -> list[list[int]]:
        """The prompts with what was generated after them."""
        prompts = asked(JOBS[self.name])
        return [[*p, *self.arrays[f"tokens{i}"].tolist()] for i, p in enumerate(prompts)]

    @property
    def losses(self) -> NDArray[np.float64]:
        """Of the windows' tokens, ``[windows, length - 1]``."""
        assert self.about
        return self.arrays["losses"]


def asked(job: Job) -> list[list[int]]:
    """The prompts whose logprobs the job wants."""
    if job.prompts == "none":
        return []
    return [*texts.prompts(), texts.long_prompt()]


class Fleet:
    """Starts jobs, each once. place: makes or finds a checkpoint by its name."""

    def __init__(self, folder: Path, place: Callable[[str], Path], gpus: int) -> None:
        self._folder, self._place, self._gpus = folder, place, gpus
        self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4))
        self._futures: dict[str, Future[Served]] = {}

    def start(self, names: Iterable[str]) -> None:
        """Queue these jobs in the order of `JOBS`."""
        wanted = set(names)
        for name in [name for name in JOBS if name in wanted]:
            if name not in self._futures:
                device = len(self._futures) % self._gpus
                self._futures[name] = self._pool.submit(self._serve, name, device)

    def served(self, name: str) -> Served:
        """Waits for a job."""
        self.start([name])
        return self._futures[name].result()

    def close(self) -> None:
        """Forget what has not started, wait for what has."""
        self._pool.shutdown(cancel_futures=True)

    def _serve(self, name: str, device: int) -> Served:
        job = JOBS[name]
        llm = {**LLM, "model": str(self._place(job.checkpoint)), **job.llm}
        if job.options:
            llm["additional_config"] = {"vllm_dsv4": dict(job.options)}
        prompts = asked(job)
        task = {
            "llm": llm, "prompts": prompts, "new_tokens": NEW_TOKENS,
            "windows": texts.windows(job.windows), "alone": texts.prompts() if job.alone else [],
        }  # fmt: skip
        request, result = self._folder / f"{name}.json", self._folder / f"{name}.npz"
        request.write_text(json.dumps(task))
        environment = {**os.environ, **ENVIRONMENT, **job.environment}
        if job.gpus < self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(device)
        started = time.monotonic()
        command = [sys.executable, str(ENGINE), str(request), str(result)]
        log = self._folder / f"{name}.log"
        code = run_program(command, environment, log, PATIENCE)
        arrays = dict(np.load(result)) if code == 0 else {}
        seconds = time.monotonic() - started
        return Served(name, code, log.read_text(errors="replace"), seconds, arrays)


def run_program(
    command: list[str], environment: Mapping[str, str], log: Path, patience: float
) -> int:
    """Its exit code, all its processes ended; -9 if it took too long."""
    with log.open("wb") as output:
        program = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return program.wait(patience)
        except subprocess.TimeoutExpired:
            return -9
        finally:
            end(program)


def end(program: subprocess.Popen[bytes]) -> None:
    """End the program and whatever it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(program.pid, number)
        except ProcessLookupError:
            break
        if number is signal.SIGTERM:
            time.sleep(1)
    program.wait()
