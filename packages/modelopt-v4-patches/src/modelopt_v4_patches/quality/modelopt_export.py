"""modelopt's own way from BF16 to NVFP4, on the CPU: what ``finalize`` takes, and ours is held to.

The few lines that its users write: load, calibrate, export_hf_checkpoint. Nothing of ours takes
part, so the result shows what modelopt and transformers make of names and config.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nvfp4_codec.checkpoint import Checkpoint

_log = logging.getLogger(__name__)


def modelopt_export(
    bf16_folder: Path,
    out: Path,
    texts: Iterable[str],
    *,
    config: str = "NVFP4_DEFAULT_CFG",
    with_mtp: bool = False,
) -> None:
    """Quantizes a small BF16 DeepSeek-V4 with modelopt and writes its export to ``out``.

    bf16_folder: official names, as ``dequant`` writes them, with a tokenizer. texts: what to
    calibrate with, one forward each. config: a name in modelopt.torch.quantization. with_mtp: hand
    the MTP tensors through, as modelopt's example script does, instead of losing them.
    """
    with warnings.catch_warnings():
        # modelopt warns of every optional plugin, and that it skips the renaming
        warnings.simplefilter("ignore")
        _export(bf16_folder, out, texts, config, with_mtp)


def _export(
    bf16_folder: Path, out: Path, texts: Iterable[str], config: str, with_mtp: bool
) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(bf16_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(bf16_folder, dtype=torch.bfloat16).eval()

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            for text in texts:
                model(tokenizer(text, return_tensors="pt").input_ids, use_cache=False)

    model = mtq.quantize(model, copy.deepcopy(getattr(mtq, config)), calibrate)
    extra: dict[str, torch.Tensor] = {}
    if with_mtp:
        with Checkpoint.open(bf16_folder) as source:
            extra = {name: source.tensor(name) for name in source.tensors if "mtp" in name}
    with torch.inference_mode():
        export_hf_checkpoint(
            model, dtype=torch.bfloat16, export_dir=out, extra_state_dict=extra or None
        )
    tokenizer.save_pretrained(out)
    _log.info("modelopt's own export: %s", out)
