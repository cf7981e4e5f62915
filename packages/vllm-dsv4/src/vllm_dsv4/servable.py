"""What keeps a checkpoint from being served, found before a GPU is touched."""

from __future__ import annotations

import os
from pathlib import Path

from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.errors import CheckpointError

from .doctor import examine, refuse
from .errors import OptionError
from .options import Options, unscaled
from .passthrough import Passthrough
from .stored import Stored, is_ours, read_stored


def read_servable(
    folder: Path, given: Passthrough, options: Options, *, skip_doctor: bool = False
) -> Stored:
    """What the folder holds; raises CheckpointError if that cannot be served.

    given: what vLLM is told besides. options: with which the plugin is to serve it. skip_doctor:
    leave out what the doctor sees in names, headers and config.json, which takes seconds; values
    are not read in any case.
    """
    stored = read_stored(folder)
    _check_claim(folder, stored)
    if not skip_doctor:
        elsewhere = given.has("tokenizer", "skip-tokenizer-init")
        errors = [
            found
            for found in examine(folder, values=False, options=options).findings
            if found.level == "error"
            and not (elsewhere and found.code in ("missing-file", "damaged-file"))
        ]
        # Where the plugin itself refuses it too, going on would not help.
        final = unscaled(stored, options)
        refuse(folder, errors, "" if final else " Or go on without this check: --skip-doctor.")
    return stored


def _check_claim(folder: Path, stored: Stored) -> None:
    packed = [module for module, own in stored.formats.items() if own == "nvfp4"]
    if packed and not is_ours(stored.config):
        raise CheckpointError(
            f"config.json does not say that {packed[0]} and {len(packed) - 1} other linears are "
            "NVFP4, so the plugin would stay out and vLLM read them as something else. Take "
            "quantization_config from the export; `vllm-dsv4 doctor` on this folder says more.",
            file=shown(str(folder / "config.json")),
        )


def check_environment(stored: Stored) -> None:
    """vLLM loads only the plugins that VLLM_PLUGINS names, if it is set."""
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and is_ours(stored.config) and "vllm_dsv4" not in plugins.split(","):
        raise OptionError(
            f"VLLM_PLUGINS is {plugins!r}, so vLLM would not load this plugin: add vllm_dsv4 to "
            "it (names with commas and no blanks between them), or unset it."
        )


def check_speculation(stored: Stored, given: Passthrough) -> None:
    """MTP blocks are needed where drafting by them is asked for."""
    if uses_mtp(given) and not stored.has_mtp:
        raise OptionError(
            "--speculative-config asks for MTP, and the checkpoint has no MTP blocks. Leave it "
            "away, or export the model again with --mtp keep."
        )


def uses_mtp(given: Passthrough) -> bool:
    """Whether drafting by MTP blocks is asked for."""
    return given.mapping("speculative-config").get("method") in ("mtp", "deepseek_mtp")
