"""``vllm-dsv4 plan``: memory per GPU, and what fits."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

from nvfp4_codec.cli_output import say

from .common import FINDINGS, OK, add_command, fail, show_json, show_table
from .options import add_options, read_options

if TYPE_CHECKING:
    from ..gpus import Gpus
    from ..options import Options
    from ..plan import Deployment, Limits, Plan, Preset
    from ..stored import Format, Stored
    from .common import Commands

_log = logging.getLogger(__name__)
#: What is shown where no GPUs are given.
_USUAL: Final = (("B200:8", 1), ("H200:8", 1), ("B200:8", 2), ("H200:8", 2))
_LEGEND: Final = """\
fits: partly, if only a shorter context than the model's (or --max-model-len) does. KV cache: what
is left for it, or by how much weights and buffers exceed what vLLM takes of the GPU.
context: tokens that one request may have. of 8k: requests of 8,192 tokens that generate at once.
Buffers are an estimate; vLLM measures them when it starts."""
#: vLLM's layers for experts that are not FP4.
_LAYERS: Final[Mapping[Format, str]] = {
    "bf16": "unquantized fused MoE (BF16)",
    "fp8_block": "FP8 fused MoE",
}
_PARALLEL: Final = ("tensor_parallel", "pipeline_parallel", "data_parallel")


def register(commands: Commands) -> None:
    """Adds the command."""
    from ..plan import Model, Preset

    parser = add_command(commands, "plan", "memory per GPU for a checkpoint, and what fits; no GPU")
    parser.add_argument("folder", nargs="?", type=Path, help="a checkpoint folder")
    parser.add_argument("--model", choices=get_args(Model), help="instead: a released model")
    parser.add_argument(
        "--stored",
        choices=get_args(Preset),
        help="with --model: how the checkpoint stores it (default: full)",
    )
    parser.add_argument(
        "--gpus",
        metavar="KIND:COUNT",
        help="such as B200:8, of one node; or 'here' (default: the usual ones)",
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes of those GPUs (default: 1)")
    for name, short in zip(_PARALLEL, ("--tp", "--pp", "--dp"), strict=True):
        flag = f"--{name.replace('_', '-')}-size"
        parser.add_argument(flag, short, dest=name, type=_positive, metavar="N")
    parser.add_argument(
        "--expert-parallel",
        "--ep",
        action=argparse.BooleanOptionalAction,
        help="experts stay whole (default: what suits the GPUs)",
    )
    parser.add_argument(
        "--mega-moe",
        action=argparse.BooleanOptionalAction,
        help="the fused kernel (default: where it runs)",
    )
    parser.add_argument("--mtp", action="store_true", help="speculative decoding with MTP blocks")
    parser.add_argument(
        "--max-model-len",
        type=_longest,
        metavar="TOKENS",
        help="such as 131072, 128k (thousands) or 128K (1024s); default, and auto: the model's",
    )
    parser.add_argument("--max-num-batched-tokens", type=_positive, help="default: vLLM's")
    parser.add_argument("--max-num-seqs", type=_positive, help="default: vLLM's")
    parser.add_argument("--gpu-memory-utilization", type=_part, default=0.92)
    add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows the plan; exit code 1 if nothing fits."""
    from ..gpus import detect_gpus, parse_gpus
    from ..moe_backend import find_backend

    if (arguments.folder is None) == (arguments.model is None):
        return fail("give a checkpoint folder or --model, one of the two")
    sized = arguments.nodes != 1 or any(getattr(arguments, name) for name in _PARALLEL)
    if arguments.gpus is None and sized:
        return fail("nodes and parallel sizes are for given GPUs: add --gpus, such as B200:8")
    if arguments.model is None and arguments.stored is not None:
        return fail("--stored is for --model; what a folder stores is read from its files")
    options = read_options(arguments)
    if options.moe_kernel is not None:
        find_backend(options.moe_kernel)
    name, stored = _model(arguments)
    if arguments.gpus is None:
        places = [parse_gpus(gpus, nodes) for gpus, nodes in _USUAL]
    elif arguments.gpus == "here":
        places = [detect_gpus(arguments.nodes)]
    else:
        places = [parse_gpus(arguments.gpus, arguments.nodes)]
    plans = _plans(arguments, stored, places, options)
    if arguments.json:
        show_json({"model": name, "plans": [found.as_json() for found in plans]})
    else:
        _show(name, stored, plans)
    return OK if any(found.fits for found in plans) else FINDINGS


def _plans(
    arguments: argparse.Namespace, stored: Stored, places: Sequence[Gpus], options: Options
) -> list[Plan]:
    """Of the usual places, those where a --moe-kernel runs; raises OptionError if there are none.

    Its backend is asked as `serve` asks it.
    """
    from ..errors import OptionError
    from ..plan import plan
    from ..plan.kernel import check_kernel

    limits, plans, refusals = _limits(arguments, stored), [], []
    for gpus in places:
        found = plan(stored, gpus, _deployment(arguments, gpus, stored), limits, options)
        if options.moe_kernel is not None:
            try:
                check_kernel(options.moe_kernel, stored, found)
            except OptionError as error:
                refusals.append((gpus, error))
                continue
        plans.append(found)
    if not plans:
        raise refusals[0][1]
    for gpus, why in refusals:
        _log.warning("%s are left out: %s", gpus, why)
    return plans


def _model(arguments: argparse.Namespace) -> tuple[str, Stored]:
    from ..plan import NAMES, released
    from ..stored import read_stored

    if arguments.folder is not None:
        stored = read_stored(arguments.folder)
        if stored.missing:
            _log.warning(
                "%d tensors are missing and not counted, such as %s: is a download going on?",
                len(stored.missing),
                stored.missing[0],
            )
        return arguments.folder.name, stored
    preset: Preset = arguments.stored or "full"
    return f"{NAMES[arguments.model]}, {preset}", released(arguments.model, preset)


def _limits(arguments: argparse.Namespace, stored: Stored) -> Limits:
    from ..plan import Limits
    from ..plan.fit import context_of

    return Limits(
        max_model_len=arguments.max_model_len or context_of(stored),
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_num_seqs=arguments.max_num_seqs,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        mtp=arguments.mtp,
    )


def _deployment(arguments: argparse.Namespace, gpus: Gpus, stored: Stored) -> Deployment:
    from ..plan import choose_deployment

    return choose_deployment(
        gpus,
        stored,
        mtp=arguments.mtp,
        **{name: getattr(arguments, name) for name in _PARALLEL},
        expert_parallel=arguments.expert_parallel,
        mega_moe=True if arguments.moe_kernel else arguments.mega_moe,
    )


def _show(name: str, stored: Stored, plans: Sequence[Plan]) -> None:
    on_disk = plans[0].on_disk
    with_mtp, mtp = sum(on_disk.values()), on_disk.get("MTP", 0)
    without = f", {_gb(with_mtp - mtp)} without MTP" if mtp else ""
    say(f"{name}: {_gb(with_mtp)} GB of weights{without}")
    rows = [_summary(found) for found in plans]
    _say_parameters(stored)
    heads = ["GPUs", "fits", "divided", "weights", "buffers", "KV cache", "context", "of 8k"]
    show_table(heads, rows, left=3, title="GB on the fullest GPU")
    say(_LEGEND)
    _say_which_experts(stored)
    if len(plans) == 1:
        _detail(plans[0])


def _say_parameters(stored: Stored) -> None:
    """The usual estimate of an NVFP4 model's size, which leaves out what stays BF16 or FP8."""
    from ..plan import parameters

    total = parameters(stored.schema)
    unit, word, size = (1e9, "billion", "GB") if total[0] >= 1e9 else (1e6, "million", "MB")
    count, with_mtp = (number / unit for number in total)
    estimate = f"{count:,.1f} {word} parameters, {0.56 * count:,.0f} {size}"
    if with_mtp > count:
        estimate += f" ({with_mtp:,.1f} with MTP, {0.56 * with_mtp:,.0f} {size})"
    say(f"{estimate} at 0.56 bytes each, were all of them NVFP4")


def _say_which_experts(stored: Stored) -> None:
    """Where DeepGEMM's kernel cannot be chosen, what vLLM runs instead."""
    from ..plan import FP4, expert_formats

    if other := expert_formats(stored) - FP4:
        kinds = " and ".join(sorted(_LAYERS[own] for own in other))
        say(f"Routed experts are not FP4: vLLM runs them in its {kinds}, on every GPU.")


def _summary(found: Plan) -> list[str]:
    parallel = found.deployment
    divided = f"TP {parallel.tensor_parallel}"
    for size, word in ((parallel.pipeline_parallel, "PP"), (parallel.data_parallel, "DP")):
        divided += f", {word} {size}" if size > 1 else ""
    divided += ", EP" if parallel.expert_parallel else ""
    divided += ", MegaMoE" if parallel.mega_moe else ""
    fits = "yes" if found.fits else "no"
    if found.fits and found.longest < found.limits.max_model_len:
        fits = "partly"
    return [
        str(found.gpus),
        fits,
        divided,
        _gb(sum(found.weights.values())),
        _gb(sum(found.buffers.values())),
        _left(found, "short by "),
        f"{found.longest:,}",
        f"{found.generating:,}",
    ]


def _detail(found: Plan) -> None:
    usable = f"{_gb(found.usable)} of {_gb(found.gpus.memory)} GB"
    rows = [[part, _gb(size)] for part, size in (*found.weights.items(), *found.buffers.items())]
    rows.append(["KV cache", _left(found, "does not fit, short by ")])
    show_table(["on the fullest GPU", "GB"], rows, left=1, title=f"{found.gpus}: {usable} used")
    layers = [
        [_layer(ratio), f"{entries:.2f}", f"{indexed:.2f}"]
        for ratio, entries, indexed in found.cache.per_layer
    ]
    heads = ["layers", "entries", "indexer"]
    show_table(heads, layers, left=1, title="KV cache, bytes per token and layer")
    say(f"{found.cache.token_bytes:,.0f} bytes for each token of context in all layers of this "
        f"GPU; blocks of {found.cache.block_bytes:,} bytes.")  # fmt: skip


def _layer(ratio: int) -> str:
    return f"compressed {ratio}:1" if ratio else "window only"


def _left(found: Plan, short: str) -> str:
    """For the KV cache; where the rest exceeds the memory, by how much, after ``short``."""
    left = found.kv_memory
    return _gb(left) if left >= 0 else f"{short}{_gb(-left)}"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f}" if nbytes >= 5e8 else f"{nbytes / 1e9:.3f}"


def _positive(text: str) -> int:
    from ..counts import read_count

    try:
        value = read_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _longest(text: str) -> int | None:
    return None if text in ("auto", "-1") else _positive(text)


def _part(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not in (0, 1]")
    return value
