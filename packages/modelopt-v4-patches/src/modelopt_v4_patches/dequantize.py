"""The official mixed checkpoint in BF16, under its official names: what calibration starts from.

FP8 (E4M3 with a scale per 128x128) and MXFP4 (two codes a byte, the width doubles) become BF16;
all else is copied byte for byte. Scales disappear, and so does what config.json says of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nvfp4_codec.checkpoint.convert import plan_bf16
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.job import Job, Outcome, run
from nvfp4_codec.checkpoint.rewrite import Rewrite, documents
from nvfp4_codec.errors import CheckpointError

from .executor import Executor, spread_with
from .official import Official, open_official
from .progress import progress


@dataclass(frozen=True)
class Dequantized:
    """What one dequantization wrote.

    weights: how many of each official format; those of "bf16", "fp32" and "int64" were copied.
    """

    weights: Mapping[str, int]
    outcome: Outcome


def dequantize_checkpoint(
    source: Path, output: Path, *, executor: Executor | None = None, resume: bool = False
) -> Dequantized:
    """Writes the folder ``output``: BF16, a new index, config.json without quantization.

    source: the official folder. executor: who writes the shards; None writes them here. A killed
    run is continued with ``resume`` and ends with the same bytes.

    Raises CheckpointError for a source that is not the official checkpoint (see
    ``open_official``), and as ``job.run`` does.
    """
    if output.suffix == ".safetensors":
        raise CheckpointError(
            "a model is a folder: shards, config.json and tokenizer. Give a folder's name.",
            file=shown(str(output)),
        )
    opened = open_official(source)
    with opened.source:
        job = _plan(opened)
        make = partial(make_job, source.absolute())
        spread = None if executor is None else spread_with(executor, make)
        with progress("dequant", job.nbytes) as advance:
            outcome = run(job, output, resume=resume, advance=advance, spread=spread)
    formats = Counter(str(entry.format) for _, entry in opened.families)
    return Dequantized(dict(formats), outcome)


def make_job(source: Path) -> Job:
    """The job that any worker can make for itself. Raises CheckpointError, as above."""
    return _plan(open_official(source))


def _plan(opened: Official) -> Job:
    source, plan = opened.source, Rewrite(opened.source)
    for family, _ in opened.families:
        if family.kind == "plain":
            plan.keep(family.members)
        else:
            plan_bf16(plan, family)
    return Job("dequant", {}, source, plan.shards(), documents(source, _change_config))


def _change_config(config: dict[str, Any]) -> None:
    """Takes out what describes the old formats; older readers know dtype as torch_dtype."""
    config.pop("quantization_config", None)
    config.pop("expert_dtype", None)
    config["torch_dtype"] = "bfloat16"
    config.pop("dtype", None)
