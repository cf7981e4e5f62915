"""Which ``vllm serve`` a checkpoint on given GPUs wants, decided before a GPU is touched.

Each choice is one line of `_flags`; what the user says stands, and comes last.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from nvfp4_codec.checkpoint.header import some_names

from .errors import OptionError, PlanError
from .gpus import Gpus, detect_gpus
from .kv_dtype import kv_cache_dtype
from .moe_backend import find_backend
from .options import KEY, Options
from .passthrough import Passthrough
from .plan import Deployment, Limits, Plan, choose_deployment, plan
from .plan.fit import context_of
from .plan.kernel import check_kernel
from .plan.kv_cache import BLOCK
from .servable import check_environment, check_speculation, read_servable, uses_mtp
from .stored import Stored

#: vLLM's name for DeepSeek-V4's prompt format, tool calls and reasoning (vLLM 0.33.0:
#: tokenizers/registry.py, tool_parsers/__init__.py, reasoning/__init__.py).
FORMAT: Final = "deepseek_v4"
MEGA_MOE: Final = "deep_gemm_mega_moe"
#: Steps are made smaller until such a context fits: what is in flight takes room in the KV cache.
_STEPS: Final = (None, 4096, 2048)
_CONTEXT: Final = 65536
_PARALLEL: Final = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
#: With these the weights are not where the plan expects them.
_ELSEWHERE: Final = ("cpu-offload-gb", "hf-overrides", "load-format", "offload-backend")


@dataclass(frozen=True)
class Command:
    """A line to run, the plan it comes from, and what the user should know."""

    argv: tuple[str, ...]
    plan: Plan
    notes: tuple[str, ...]

    @property
    def line(self) -> str:
        """As a shell wants it."""
        return shlex.join(self.argv)


def serve_command(
    folder: Path,
    gpus: Gpus | None = None,
    options: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
    *,
    nodes: int = 1,
    skip_doctor: bool = False,
) -> Command:
    """The ``vllm serve`` line for a checkpoint folder.

    gpus: None asks this machine, which is one of ``nodes`` alike, once everything else is known to
    be right. options: of `Options`, those that were given; they win over those in the user's
    --additional-config. arguments: everything else for vLLM, passed through. skip_doctor: do not
    look for what the doctor finds by header.

    Raises CheckpointError for a folder that cannot be served, OptionError for options that
    contradict it or each other, PlanError where it cannot fit.
    """
    given = Passthrough(arguments)
    additional = _additional(given, options or {})
    own = Options.from_mapping((additional or given.mapping("additional-config")).get(KEY))
    stored = read_servable(folder, given, own, skip_doctor=skip_doctor)
    if own.moe_kernel is not None:
        find_backend(own.moe_kernel)
    check_environment(stored)
    check_speculation(stored, given)
    gpus = gpus or detect_gpus(nodes)
    deployment = _deployment(gpus, stored, given, own)
    found = _fitting(stored, gpus, deployment, given, own)
    if own.moe_kernel is not None:
        check_kernel(own.moe_kernel, stored, found)
    argv = ["vllm", "serve", str(folder)]
    for name, value in _flags(stored, found, given):
        argv += [f"--{name}"] if value is None else [f"--{name}", value]
    rest = given.arguments
    if additional:
        argv += ["--additional-config", json.dumps(additional)]
        rest = given.without("additional-config")
    return Command((*argv, *rest), found, tuple(_notes(stored, found, given)))


def _flags(stored: Stored, found: Plan, given: Passthrough) -> Iterator[tuple[str, str | None]]:
    """What the user has not said himself."""
    deployment = found.deployment
    if not given.has("tokenizer-mode"):
        yield "tokenizer-mode", FORMAT
    if given.switch("enable-auto-tool-choice") is not False:
        if not given.has("enable-auto-tool-choice"):
            yield "enable-auto-tool-choice", None
        if not given.has("tool-call-parser"):
            yield "tool-call-parser", FORMAT
    if not given.has("reasoning-parser"):
        yield "reasoning-parser", FORMAT
    if not given.has("kv-cache-dtype") and (dtype := kv_cache_dtype(stored.config)):
        yield "kv-cache-dtype", dtype
    if not given.has("block-size"):
        yield "block-size", str(BLOCK)
    for name, size in (
        ("tensor-parallel-size", deployment.tensor_parallel),
        ("pipeline-parallel-size", deployment.pipeline_parallel),
    ):
        if size > 1 and not given.has(name):
            yield name, str(size)
    if found.gpus.nodes > 1 and not given.has("distributed-executor-backend", "nnodes"):
        yield "distributed-executor-backend", "ray"
    if deployment.expert_parallel and not given.has("enable-expert-parallel"):
        yield "enable-expert-parallel", None
    if deployment.mega_moe and _moe_backend(given) is None:
        yield "moe-backend", MEGA_MOE
    if not given.has("max-model-len"):
        yield "max-model-len", "auto"
    step = found.limits.max_num_batched_tokens
    if step is not None and not given.has("max-num-batched-tokens"):
        yield "max-num-batched-tokens", str(step)


def _additional(given: Passthrough, options: Mapping[str, object]) -> dict[str, Any]:
    """The user's --additional-config with our options in it."""
    if any(name.startswith("--additional-config.") for name in map(_dashed, given.arguments)):
        if options:
            raise OptionError(
                "--additional-config is given in parts (by dotted names): give it as one JSON "
                "object, into which vllm-dsv4's own options are then written."
            )
        return {}
    found = given.mapping("additional-config")
    if not options:
        return found if KEY in found else {}
    ours = found.get(KEY, {})
    if not isinstance(ours, dict):
        raise OptionError(f"--additional-config has a {KEY!r} that is no object: {ours!r}.")
    return {**found, KEY: {**ours, **options}}


def _dashed(argument: str) -> str:
    return argument.replace("_", "-")


def _moe_backend(given: Passthrough) -> str | None:
    """As given, by its own option or within --kernel-config."""
    backend = given.value("moe-backend") or given.mapping("kernel-config").get("moe_backend")
    return None if backend is None else str(backend)


def _deployment(gpus: Gpus, stored: Stored, given: Passthrough, options: Options) -> Deployment:
    backend = _moe_backend(given)
    fused = None if backend is None else backend == MEGA_MOE
    if options.moe_kernel is not None and backend is None:
        fused = True  # it gets its tokens from vLLM's layer for the fused kernel
    return choose_deployment(
        gpus,
        stored,
        mtp=uses_mtp(given),
        tensor_parallel=given.integer("tensor-parallel-size"),
        pipeline_parallel=given.integer("pipeline-parallel-size"),
        data_parallel=given.integer("data-parallel-size"),
        expert_parallel=given.switch("enable-expert-parallel"),
        mega_moe=fused,
    )


def _fitting(
    stored: Stored, gpus: Gpus, deployment: Deployment, given: Passthrough, options: Options
) -> Plan:
    """The plan with the largest steps that leave room for a long context.

    Raises PlanError if the weights alone exceed the memory.
    """
    step = given.integer("max-num-batched-tokens")
    limits = Limits(
        max_model_len=given.integer("max-model-len") or context_of(stored),
        max_num_seqs=given.integer("max-num-seqs"),
        gpu_memory_utilization=given.part("gpu-memory-utilization")
        or Limits.gpu_memory_utilization,
        mtp=uses_mtp(given),
    )
    plans = []
    for tokens in (step,) if step else _STEPS:
        chosen = replace(limits, max_num_batched_tokens=tokens)
        plans.append(plan(stored, gpus, deployment, chosen, options))
        if plans[-1].longest >= min(_CONTEXT, limits.max_model_len):
            return plans[-1]
    found = max(plans, key=lambda each: each.longest)
    if found.fits:
        return found
    needed = sum(found.weights.values())
    if needed > gpus.memory and not given.has(*_ELSEWHERE):
        raise PlanError(
            f"the weights take {needed / 1e9:.0f} GB on the fullest GPU, and each of {gpus} has "
            f"{gpus.memory / 1e9:.0f} GB. Use more GPUs, or --nodes; `vllm-dsv4 plan` shows what "
            "fits."
        )
    return found


def _notes(stored: Stored, found: Plan, given: Passthrough) -> Iterator[str]:
    yield from stored.notes
    if stored.unknown:
        yield (
            f"{len(stored.unknown)} tensors are not the model's and are not loaded: "
            f"{some_names(stored.unknown)}"
        )
    deployment, gpus = found.deployment, found.gpus
    if deployment.gpus < gpus.total:
        why = "the model's heads, output groups and experts do not divide further"
        if given.has(*_PARALLEL):
            why = "by the parallel sizes that were given"
        yield (
            f"{deployment.gpus} of {gpus.total} GPUs are used: {why}; --data-parallel-size uses "
            "the others"
        )
    if gpus.nodes > 1 and not given.has("nnodes"):
        yield (
            f"{gpus.nodes} nodes: start Ray on each of them first (`ray start`), with the "
            "checkpoint under the same path, and run this on one"
        )
    if not found.fits:
        left = found.kv_memory / 1e9
        gb = f"{abs(left):.1f} GB"
        why = f"{gb} are left for the KV cache" if left >= 0 else f"short by {gb}"
        yield f"by the plan this does not fit, {why}. vLLM's own measurement decides"
    elif found.longest < found.limits.max_model_len:
        yield f"by the plan, a context of about {found.longest:,} tokens fits; vLLM measures it"
