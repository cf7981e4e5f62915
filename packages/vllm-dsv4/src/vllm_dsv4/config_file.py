"""config.json of a folder, refused by key where a value cannot be read for what it is.

What reads one goes through `check_types`, so that everything else may take the types of
quantization_config, and of the lists and counts that say which layers there are, for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from nvfp4_codec.checkpoint.header import shown
from nvfp4_codec.checkpoint.rewrite import read_config
from nvfp4_codec.errors import CheckpointError

_BLOCK: Final = "quantization_config"
_FIX: Final = "Repair it, or export again: exports write the whole block."
_FROM_SOURCE: Final = "Take it from the official config.json."


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


_LAYERS: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "compress_ratios": (_are_counts, "a list of numbers, one for each layer,"),
    "layer_types": (_are_words, "a list of words, one for each layer,"),
    "mlp_layer_types": (_are_words, "a list of words, one for each layer,"),
    "num_hash_layers": (_is_count, "a number of layers"),
    "num_nextn_predict_layers": (_is_count, "a number of MTP blocks"),
    "dspark_target_layer_ids": (lambda value: isinstance(value, list), "a list of layers"),
}


def config_of(folder: Path) -> dict[str, Any]:
    """Its config.json; raises CheckpointError where there is none, and as `check_types` does."""
    if folder.is_file():
        raise CheckpointError(
            "this is a file. Give the folder of a DeepSeek-V4 checkpoint, with its config.json.",
            file=shown(str(folder)),
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {shown(str(folder))}. Give that of a DeepSeek-V4 checkpoint; one "
            "on a hub is downloaded first, such as with `hf download`."
        )
    config = read_config(folder)
    if config is None:
        raise CheckpointError(
            f"the folder {shown(str(folder))} has no config.json. Give that of a DeepSeek-V4 "
            "checkpoint."
        )
    check_types(config)
    return config


def check_types(config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a value of an unusable type: see the module."""
    for key, (fits, expected) in _LAYERS.items():
        value = config.get(key)
        if value is not None and not fits(value):
            raise _wrong(key, value, expected, _FROM_SOURCE)
    block = config.get(_BLOCK)
    if block is None:
        return
    if not isinstance(block, Mapping):
        raise _wrong(_BLOCK, block, "an object")
    _check_layers(block.get("quantized_layers"))
    for key in ("ignore", "exclude_modules"):
        names = block.get(key)
        if names is not None and not _are_words(names):
            raise _wrong(f"{_BLOCK}.{key}", names, "a list of module names")
    size = block.get("weight_block_size")
    if size is not None and not (
        isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    ):
        raise _wrong(f"{_BLOCK}.weight_block_size", size, "a pair of numbers, such as [128, 128],")


def _check_layers(layers: object) -> None:
    key = f"{_BLOCK}.quantized_layers"
    if layers is None:
        return
    if not isinstance(layers, Mapping):
        raise _wrong(key, layers, 'an object {module: {"quant_algo": ...}}')
    for module, how in layers.items():
        if not (isinstance(how, Mapping) and isinstance(how.get("quant_algo", ""), str)):
            raise _wrong(
                f"{key}[{str(module)!r}]", how, 'an object such as {"quant_algo": "NVFP4"}'
            )


def _wrong(key: str, found: object, expected: str, fix: str = _FIX) -> CheckpointError:
    message = f"{shown(key)} is {shown(repr(found))}; {expected} is needed. {fix}"
    return CheckpointError(message, file="config.json")
