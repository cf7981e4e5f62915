"""The examination as a whole: what is looked at, in which order, and what each finding means."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from nvfp4_codec.checkpoint.deepseek_v4.folder import check_files
from nvfp4_codec.checkpoint.deepseek_v4.quantization import check_entries, check_older
from nvfp4_codec.checkpoint.deepseek_v4.stored import Model
from nvfp4_codec.checkpoint.deepseek_v4.structure import check_same_model
from nvfp4_codec.checkpoint.families import natural_key
from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.verify import Finding
from nvfp4_codec.errors import CheckpointError

from ..options import Options
from ..stored import is_ours
from .activations import MISSING, look_at_activations
from .catalogue import CATALOGUE, Handled, Row
from .config import look_at_config
from .diagnosis import Diagnosis, Evidence, Examination, Level, Looked
from .folder import look_at_documents, look_at_strays, open_folder
from .headers import look_at_headers, look_at_packing
from .names import look_at_names, sort_names
from .nibbles import NO_EVIDENCE, look_at_nibbles, nibble_evidence
from .nibbles import Evidence as NibbleEvidence
from .values import NOTHING_READ, Values, look_at_values

_REFERENCE: Final = "--reference OFFICIAL tells"
_DEFAULT: Final = Options()


def examine(
    folder: str | Path,
    reference: str | Path | None = None,
    *,
    values: bool = True,
    options: Options | None = _DEFAULT,
) -> Examination:
    """Looks at a checkpoint folder. Needs no GPU and no vLLM, and changes nothing.

    reference: the official checkpoint that it was made from, which turns statistics into
    certainty for the weights that are sampled. values: False looks at names, headers and
    config.json only. options: with which the plugin would serve it, as it refuses NVFP4 without
    input_scale that would have to run; None: not to be served as it is.

    Raises CheckpointError for what is no DeepSeek-V4 checkpoint at all.
    """
    started = time.monotonic()
    folder = Path(folder)
    with ExitStack() as stack:
        opened = open_folder(folder)
        if isinstance(opened, list):
            return _unopened(folder, opened, started)
        stack.callback(opened.close)
        model = sort_names(opened)
        other = None if reference is None else stack.enter_context(_open_reference(Path(reference)))
        return _examine(folder, model, other, started, values=values, options=options)


def _open_reference(folder: Path) -> Model:
    try:
        return Model.open(folder)
    except CheckpointError as error:
        raise CheckpointError(f"the reference cannot be used: {error}") from None


def _unopened(folder: Path, findings: list[Finding], started: float) -> Examination:
    return Examination(
        shown(str(folder)),
        "unreadable",
        "unknown",
        "nothing: its files cannot be opened",
        tuple(_diagnose(finding, frozenset(), None) for finding in findings),
        ("everything else: names, formats and values are looked at once all files can be opened",),
        Looked(),
        time.monotonic() - started,
    )


def _examine(
    folder: Path,
    model: Model,
    reference: Model | None,
    started: float,
    *,
    values: bool,
    options: Options | None,
) -> Examination:
    packing = look_at_packing(model)
    findings = [finding for found in packing.values() for finding in found]
    findings += look_at_names(model, packing)
    findings += look_at_headers(model, packing)
    findings = look_at_activations(model, options, findings)
    of_config = [*model.findings, *check_entries(model)[0], *check_older(model)]
    if reference is not None:
        of_config += check_same_model(model.config, reference.config)
    findings += check_files(model.checkpoint, None) + look_at_strays(model.checkpoint)
    findings += look_at_documents(model.checkpoint.root)
    findings = look_at_config(model.config, of_config + findings)
    read = look_at_values(model, reference) if values else NOTHING_READ
    nibbles = nibble_evidence(model) if values else NO_EVIDENCE
    findings += read.findings
    if reference is None:
        findings += look_at_nibbles(model, nibbles)
    helped = _helped(model)
    refused = any(finding.code == MISSING for finding in findings)
    diagnoses = (_diagnose(f, helped, _compared(model, f, read)) for f in dict.fromkeys(findings))
    checkpoint = model.checkpoint
    return Examination(
        shown(str(folder)),
        _kind(model),
        model.scheme,
        _serving(model, refused=refused),
        tuple(sorted(diagnoses, key=_order)),
        tuple(_open_questions(model, reference, read, nibbles)),
        Looked(
            len(checkpoint.paths),
            len(checkpoint),
            len(model.tensors),
            read.weights,
            sum(info.nbytes for info in checkpoint),
            read.nbytes,
        ),
        time.monotonic() - started,
    )


def _diagnose(finding: Finding, helped: Container[Handled], compared: float | None) -> Diagnosis:
    """helped: what is put right. compared: SQNR in dB against the reference, if there is one."""
    row = CATALOGUE.get(finding.code, Row("The output cannot be trusted."))
    evidence: Evidence = "certain" if finding.confidence == "certain" else "statistics"
    if compared is not None:
        evidence = "reference"
    level: Level = "error"
    if row.handled in helped:
        level = "handled"
    elif evidence == "statistics" and finding.confidence != "high":
        level = "suspected"
    return Diagnosis(
        finding.code,
        level,
        evidence,
        finding.tensor,
        finding.file,
        finding.found,
        finding.expected,
        row.effect,
        finding.fix,
    )


def _compared(model: Model, finding: Finding, values: Values) -> float | None:
    entry = model.schema.find(finding.tensor, model.scheme)
    return None if entry is None else values.sqnr.get(entry.name())


def _order(found: Diagnosis) -> tuple[object, ...]:
    levels = ("error", "suspected", "handled")
    return levels.index(found.level), natural_key(found.tensor), found.code


def _is_experts_only(model: Model) -> bool:
    return "fp8" in str((model.quantization or {}).get("quant_method"))


def _helped(model: Model) -> frozenset[Handled]:
    """The plugin fills config.json of all NVFP4 checkpoints; it reads the weights of most."""
    if not is_ours(model.config):
        return frozenset({"always"})
    if _is_experts_only(model):
        return frozenset({"always", "config"})
    return frozenset({"always", "config", "transform"})


def _serving(model: Model, *, refused: bool) -> str:
    if not is_ours(model.config):
        return (
            "stock vLLM, as far as it knows names and formats: config.json claims no NVFP4, so the "
            "plugin stays out"
        )
    if not _is_experts_only(model):
        return "vLLM with the plugin" + (f", but not as it is: see {MISSING}" if refused else "")
    take_over = "--moe-backend deep_gemm_mega_moe, or with an option of the plugin's own"
    if model.scheme == "official":
        return f"stock vLLM; the plugin takes over with {take_over}"
    return f"the plugin with {take_over}; stock vLLM does not know {model.scheme} names"


def _kind(model: Model) -> str:
    """What the checkpoint is, by what it says of itself and what its experts are."""
    formats = {s.format for s in model.tensors.values() if s.entry.role == "routed_expert"}
    experts = " and ".join(sorted(formats)) or "no"
    quantization = model.quantization or {}
    method = quantization.get("quant_method")
    if method == "modelopt":
        return f"modelopt export, {experts} experts"
    if quantization.get("moe_quant_algo") == "NVFP4":
        return f"experts-only layout, {experts} experts"
    return f"official layout, {experts} experts" if method else f"unquantized, {experts} experts"


def _open_questions(
    model: Model, reference: Model | None, values: Values, nibbles: NibbleEvidence
) -> Iterable[str]:
    packed = any(stored.layout == "nvfp4" for stored in model.tensors.values())
    if packed and reference is None:
        yield f"w1 (gate) and w3 (up) exchanged has no trace in the bytes: {_REFERENCE}"
        yield f"a factor common to a whole weight has no trace in the bytes: {_REFERENCE}"
        if not (nibbles.sound or nibbles.swapped):
            yield f"nibbles swapped in all packed weights alike leave no clear trace: {_REFERENCE}"
    left = len(model.tensors) - values.weights
    if left > 0:
        yield (
            f"block scales and values of the {left} weights that were not sampled: "
            "`nvfp4 verify` reads all"
        )
