"""The doctor's findings as one error, for commands that do not go on with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.errors import CheckpointError

from .diagnosis import Diagnosis


def refuse(folder: Path, findings: Sequence[Diagnosis], otherwise: str = "") -> None:
    """Raises CheckpointError for the first finding, if there is one, counting the others.

    otherwise: what else there is to do, besides what the finding says.
    """
    if not findings:
        return
    first = findings[0]
    more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
    of_tensor = first.file.endswith(".safetensors")
    raise CheckpointError(
        f"{'' if of_tensor else f'{first.tensor}: '}{first.found}; expected {first.expected} "
        f"({first.code}{more}). {first.fix} `vllm-dsv4 doctor {shown(str(folder))}` says "
        f"more.{otherwise}",
        file=first.file,
        tensor=first.tensor if of_tensor else None,
    )
