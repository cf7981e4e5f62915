"""The BF16 checkpoint that calibration starts from: checked by its headers, then loaded whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from nvfp4_codec.checkpoint.files import inside, read_config_file
from nvfp4_codec.checkpoint.header import shown, some_names
from nvfp4_codec.checkpoint.reader import Checkpoint
from nvfp4_codec.schemas.deepseek_v4 import ModelConfig

from ..errors import CalibrationError
from .memory import Room, max_memory

_STORED_DTYPES: Final = frozenset(("BF16", "F32", "I64"))


def check_source(source: Path) -> dict[str, Any]:
    """The source's config.json, if it is a BF16 DeepSeek-V4.

    Raises CalibrationError otherwise: quantized modules run quantized kernels, whose activations
    are not the ones to calibrate on, and which fail in odd places under modelopt.
    """
    path = inside(source, "config.json", str(source))
    config = read_config_file(path, path.name)
    ModelConfig.from_dict(config)
    remedy = f"calibrate a BF16 copy: `dsv4-quantize dequant {source} BF16_FOLDER`."
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        raise CalibrationError(f"file config.json: quantized by {method!r}; {remedy}")
    with Checkpoint.open(source) as checkpoint:
        for info in checkpoint:
            if info.dtype not in _STORED_DTYPES:
                raise CalibrationError(
                    f"file {shown(info.file)}, tensor {shown(info.name)}: dtype {info.dtype}; "
                    + remedy
                )
    return config


def load_model(source: Path, room: Room) -> Any:
    """The model in BF16, on the CPU or over all GPUs and what remains of the CPU's memory.

    Raises CalibrationError where transformers would fill in random numbers.
    """
    from transformers import AutoModelForCausalLM

    placement: dict[str, Any] = {}
    if room.kind == "gpu":
        placement = {"device_map": "sequential", "max_memory": max_memory(room)}
    model, info = AutoModelForCausalLM.from_pretrained(
        source, dtype="bfloat16", local_files_only=True, output_loading_info=True, **placement
    )
    unknown = [name for name in info["unexpected_keys"] if not name.startswith("mtp.")]
    for what, names in (("lacks", info["missing_keys"]), ("has unknown", unknown)):
        if names:
            raise CalibrationError(
                f"{shown(str(source))} {what} {len(names)} tensors: {some_names(sorted(names))}. "
                "`dsv4-quantize dequant` writes a complete checkpoint."
            )
    return model.eval()
