"""An existing modelopt export, made into a checkpoint that loaders of DeepSeek-V4 take.

Names become DeepSeek's, config.json becomes the official one with the export's quantization, and
``ignore`` lists every linear that is stored unquantized. The data stays as it is, which matters at
881 GB: official names are shorter, so a new header fits into the old one's place, and the new
files share their blocks with the old ones where the file system can do that.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from nvfp4_codec.checkpoint import Checkpoint
from nvfp4_codec.checkpoint.files import inside, read_small
from nvfp4_codec.checkpoint.header import relabel, shown
from nvfp4_codec.checkpoint.job import json_bytes
from nvfp4_codec.checkpoint.reader import INDEX_NAME
from nvfp4_codec.checkpoint.rewrite import COPIED_NAMES, documents, read_config
from nvfp4_codec.checkpoint.writer import Fault, no_fault
from nvfp4_codec.errors import CheckpointError
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig, Scheme
from nvfp4_codec.schemas.deepseek_v4.encoding import encoding_files
from nvfp4_codec.schemas.deepseek_v4.recognize import Recognized, recognize

from .renaming.exported_config import ExportedConfig, complete_config, read_reference
from .renaming.fused import FusedGroup, fused_groups, half_quantized
from .renaming.inplace import finish, is_interrupted, locked, relabel_in_place
from .renaming.relabel import Written, relabel_to_folder

#: Without these no server starts.
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")
_MAX_COPIED_BYTES: Final = 1 << 28


@dataclass(frozen=True)
class Report:
    """What was found and done.

    groups, differing: fused groups by kind, and those of them with more than one weight_scale_2.
    copied_documents: small files taken from the reference's folder; missing_documents: tokenizer
    files that are nowhere. written: None if that was in place.
    """

    scheme: Scheme
    num_tensors: int
    renamed: int
    has_mtp: bool
    config: ExportedConfig
    groups: Mapping[str, int]
    differing: Mapping[str, tuple[FusedGroup, ...]]
    half_quantized: tuple[str, ...]
    copied_documents: tuple[str, ...]
    missing_documents: tuple[str, ...]
    written: Written | None = None

    @property
    def findings(self) -> tuple[str, ...]:
        """What still stands between the result and a server, a sentence each."""
        found = [
            f"{name} is missing: copy it from the official checkpoint, or give that folder as the "
            "reference"
            for name in self.missing_documents
        ]
        found += [
            f"{len(groups)} of {self.groups[kind]} {kind} differ in weight_scale_2, by up to "
            f"{max(group.ratio for group in groups):.4g} times: loaders keep one of the two and "
            "garble the other; pass --unify"
            for kind, groups in self.differing.items()
            if self.written is None or kind not in self.written.unified
        ]
        if self.half_quantized:
            found.append(
                f"{len(self.half_quantized)} linears are unquantized but fused with quantized "
                f"ones, the first is {self.half_quantized[0]}: loaders cannot fuse them"
            )
        return tuple(found)


def finalize_checkpoint(
    source: Path,
    output: Path | None,
    *,
    reference_config: Path,
    in_place: bool = False,
    unify: bool = False,
    flat_rope: bool = False,
    resume: bool = False,
    fault: Fault = no_fault,
) -> Report:
    """Gives a modelopt NVFP4 export of DeepSeek-V4 official names and a complete config.

    source: its folder, with HF, half-converted or official names. reference_config: the official
    config.json; given as the official checkpoint's folder, lacking tokenizer files come from there.
    output: a new folder; None with in_place, which writes new headers and JSON files into source
    after journalling the old ones there (see ``inplace``), and needs room for nothing else.
    unify: give fused projections one weight_scale_2, the larger, rescaling block scales.
    flat_rope: see ``exported_config``. resume: continue an interrupted run of the same arguments.

    Raises CheckpointError for a source that is not exactly the reference's model, naming its
    unknown, missing and misshapen tensors, and as ``nvfp4_codec.checkpoint.job.run`` does.
    """
    if in_place != (output is None):
        raise CheckpointError("give either an output folder or in_place.", file=shown(str(source)))
    if in_place and unify:
        raise CheckpointError(
            "unify changes data, which in_place never does. Write to a new folder.",
            file=shown(str(source)),
        )
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {shown(str(source))}. Give that of the export.")
    reference = read_reference(reference_config)
    if output is None:
        with locked(source):
            if is_interrupted(source):
                if not resume:
                    raise _between_states(source)
                finish(source, fault=fault)
            with Checkpoint.open(source) as checkpoint:
                plan = _plan(checkpoint, reference, reference_config, flat_rope)
                _rewrite_here(plan, fault)
                return plan.report
    if is_interrupted(source):
        raise _between_states(source)
    with Checkpoint.open(source) as checkpoint:
        plan = _plan(checkpoint, reference, reference_config, flat_rope)
        groups = [g for found in plan.report.differing.values() for g in found if unify]
        written = relabel_to_folder(
            checkpoint, plan.model, plan.documents, output, groups, resume=resume, fault=fault
        )
        return replace(plan.report, written=written)


def undo_in_place(source: Path, *, fault: Fault = no_fault) -> None:
    """Takes back an interrupted run in place; CheckpointError if there is none."""
    with locked(source):
        finish(source, undo=True, fault=fault)


def _between_states(source: Path) -> CheckpointError:
    return CheckpointError(
        "an interrupted run in place left this folder between two states. Finish it with "
        "--in-place --resume, or take it back with --in-place --undo.",
        file=shown(str(source)),
    )


@dataclass(frozen=True)
class _Plan:
    """What the new checkpoint is made of; nothing is written yet."""

    source: Checkpoint
    model: Recognized
    documents: Mapping[str, bytes]
    report: Report


def _plan(
    source: Checkpoint, reference: Mapping[str, Any], reference_path: Path, flat_rope: bool
) -> _Plan:
    export = read_config(source.root)
    if export is None:
        raise CheckpointError(
            "no config.json beside the weights: this is no export of modelopt. Give the folder "
            "that export_hf_checkpoint wrote.",
            file=shown(str(source.root)),
        )
    model = recognize(source, ModelConfig.from_dict(reference))
    config = complete_config(export, reference, model, flat_rope=flat_rope)
    found = documents(source, lambda config: None) | encoding_files(source.root)
    folder = reference_path if reference_path.is_dir() else None
    copied = _from_reference(folder, found)
    found |= copied
    found["config.json"] = json_bytes(config.config)
    found["hf_quant_config.json"] = json_bytes(config.hf_quant_config)
    groups = list(fused_groups(source, model))
    kinds = Counter(group.kind for group in groups)
    differing = {kind: tuple(g for g in groups if g.kind == kind and g.ratio > 1) for kind in kinds}
    report = Report(
        scheme=model.scheme,
        num_tensors=len(source),
        renamed=sum(old != new for old, new in model.names.items()),
        has_mtp=model.has_mtp,
        config=config,
        groups=kinds,
        differing={kind: found for kind, found in differing.items() if found},
        half_quantized=half_quantized(model),
        copied_documents=tuple(copied),
        missing_documents=tuple(name for name in TOKENIZER_FILES if name not in found),
    )
    return _Plan(source, model, found, report)


def _from_reference(folder: Path | None, have: Collection[str]) -> dict[str, bytes]:
    """Small files that the export lacks and the official checkpoint has."""
    if folder is None:
        return {}
    files = {
        name: read_small(inside(folder, name, str(folder)), _MAX_COPIED_BYTES, name)
        for name in sorted(COPIED_NAMES)
        if os.path.lexists(folder / name)
    }
    files |= encoding_files(folder)
    return {name: data for name, data in files.items() if name not in have}


def _rewrite_here(plan: _Plan, fault: Fault) -> None:
    source, found = plan.source, dict(plan.documents)
    if source.index is not None:
        files = {plan.model.names[name]: file for name, file in source.index.items()}
        total = sum(info.nbytes for info in source)
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        found[INDEX_NAME] = json_bytes(document)
    relabel_in_place(
        source,
        {file: relabel(h, plan.model.names) for file, h in source.headers.items()},
        found,
        fault=fault,
    )
