"""What quantization_config tells a loader of every matrix.

A loader never looks at the bytes: it builds parameters from quantization_config and fills them by
name. So a matrix that is stored otherwise fails to load, or worse, loads.

Sources for who reads what: modelopt's exports (``ignore``, ``quantized_layers``), NVIDIA's
experts-only checkpoints of DeepSeek-V4 (quant_method "fp8" with ``moe_quant_algo``), vLLM 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from typing import Any, Final, NamedTuple

from ...errors import CheckpointError
from ...schemas.deepseek_v4 import Layout
from ...schemas.deepseek_v4.names import is_glob
from .stored import Stored

NVFP4: Final = ("NVFP4", "W4A16_NVFP4")
_OFFICIAL: Final = ("FP8", "FP8_PB_WO", "MXFP4")


class Promise(NamedTuple):
    """How a matrix is stored according to the config; ``activations``: quantized as well."""

    layout: Layout
    activations: bool = False


class Selector:
    """A list of module names, containers and globs, asked for one module after another."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._names: set[str] = set()
        blocks: dict[str, list[str]] = {}
        for entry in entries:
            if is_glob(entry):
                blocks.setdefault(_block(re.split(r"[*?[]", entry, maxsplit=1)[0]), []).append(
                    entry
                )
            else:
                self._names.add(entry)
        # exporters write hundreds of globs, one for each layer, against 75,000 modules
        self._globs = {
            block: re.compile("|".join(translate(glob) for glob in globs))
            for block, globs in blocks.items()
        }

    def find(self, module: str) -> str | None:
        """What selects the module: the entry that names it or a parent, or "*" for a glob."""
        name = module
        while name:
            if name in self._names:
                return name
            name = name.rpartition(".")[0]
        for block in {"", _block(module)}:
            glob = self._globs.get(block)
            if glob is not None and glob.match(module):
                return "*"
        return None


def _block(name: str) -> str:
    found = re.match(r"(?:model\.)?((?:layers|mtp)\.[0-9]+)\.", name)
    return found[1] if found else ""


class Promises:
    """quantization_config, read as a loader reads it."""

    def __init__(self, quantization: Mapping[str, Any] | None) -> None:
        self._config = quantization or {}
        ignored = self._config.get("ignore") or []
        layers = self._config.get("quantized_layers") or {}
        if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
            raise _malformed("ignore", "a list of names")
        if not isinstance(layers, dict) or not all(isinstance(a, dict) for a in layers.values()):
            raise _malformed("quantized_layers", 'an object {name: {"quant_algo"}}')
        #: The entries of ``ignore`` and of ``quantized_layers``.
        self.ignored: tuple[str, ...] = tuple(ignored)
        self.layers: Mapping[str, Mapping[str, Any]] = layers
        self._ignored = Selector(self.ignored)
        self._layers = Selector(self.layers)

    def of(self, stored: Stored, module: str) -> Promise:
        """What the config says of one matrix, whose module name is as the config spells it."""
        config, entry = self._config, stored.entry
        method, algo = config.get("quant_method"), config.get("quant_algo")
        compressed: Layout = "official" if entry.format in ("fp8_block", "mxfp4") else "plain"
        if method in ("fp8", "deepseek_v4_fp8"):
            if entry.role != "routed_expert" or config.get("moe_quant_algo") != "NVFP4":
                return Promise(compressed)
            if self.layers:
                return Promise("nvfp4", True) if self._listed(module) else Promise(compressed)
            ignored = self._ignored.find(module) is not None
            return Promise(compressed) if ignored else Promise("nvfp4", True)
        if method == "modelopt" and algo in NVFP4:
            ignored = self._ignored.find(module) is not None
            return Promise("plain") if ignored else Promise("nvfp4", algo == "NVFP4")
        if method == "modelopt" and algo == "MIXED_PRECISION":
            of_module = self._listed(module)
            if of_module in NVFP4:
                return Promise("nvfp4", of_module == "NVFP4")
            return Promise(compressed if of_module in _OFFICIAL else "plain")
        return Promise("plain")

    def group_sizes(self) -> list[tuple[str, object]]:
        """(key, group_size) of all that is said of NVFP4, each size once for each list."""
        config, found = self._config, dict[tuple[str, str], tuple[str, object]]()
        if "group_size" in config:
            found["group_size", ""] = ("group_size", config["group_size"])
        for name, layer in self.layers.items():
            if layer.get("quant_algo") in NVFP4 and "group_size" in layer:
                size = layer["group_size"]
                found.setdefault(
                    ("layers", repr(size)), (f"quantized_layers.{name}.group_size", size)
                )
        groups = config.get("config_groups")
        for name, group in groups.items() if isinstance(groups, dict) else ():
            if not isinstance(group, dict) or group.get("quant_algo", "NVFP4") not in NVFP4:
                continue
            for part in ("weights", "input_activations"):
                values = group.get(part)
                if isinstance(values, dict) and values.get("num_bits") == 4:
                    key = f"config_groups.{name}.{part}.group_size"
                    if "group_size" in values:
                        found[key, ""] = (key, values["group_size"])
        return list(found.values())

    def _listed(self, module: str) -> str | None:
        """The algorithm that ``quantized_layers`` gives a module."""
        key = self._layers.find(module)
        if key is None:
            return None
        if key == "*":
            key = next(glob for glob in self.layers if Selector([glob]).find(module))
        return str(self.layers[key].get("quant_algo"))


def contradictions(promises: Promises) -> list[str]:
    """Entries of ``quantized_layers`` that ``ignore`` selects too, as a name or by a glob."""
    ignored = Selector(promises.ignored)
    known = set(promises.ignored)
    return [
        name
        for name in promises.layers
        if name in known or (not is_glob(name) and ignored.find(name) is not None)
    ]


def _malformed(key: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"quantization_config.{key} is malformed; expected {expected}. Repair it, or export again.",
        file="config.json",
    )
