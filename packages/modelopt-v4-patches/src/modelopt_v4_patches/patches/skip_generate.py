"""hf_ptq's generation of a sample before and after quantizing is always skipped.

hf_ptq is a script of the Model-Optimizer repository, not of its wheel: the patch applies if the
script is loaded as a module, or is the running program. Drivers call `force_skip_generate`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from ..errors import PatchError
from ..patch import Function, Patch
from .modelopt import PACKAGE, VERSIONS

_SCRIPTS = ("hf_ptq", "__main__")
_TELLS = ("parse_args", "export_quantized", "post_quantize")


def force_skip_generate(arguments: argparse.Namespace) -> argparse.Namespace:
    """Sets skip_generate, in place; returns the arguments.

    Raises PatchError if they have no such option, as those of another script.
    """
    if not hasattr(arguments, "skip_generate"):
        raise PatchError("these arguments have no skip_generate: they are not those of hf_ptq")
    arguments.skip_generate = True
    return arguments


def _wrap(original: Function) -> Function:
    def parse_args(*args: Any, **kwargs: Any) -> argparse.Namespace:
        return force_skip_generate(original(*args, **kwargs))

    return parse_args


@dataclass(frozen=True, kw_only=True)
class _ScriptPatch(Patch):
    """Never imports the script, and knows it by the functions in it, which every release has."""

    def unknown_version(self) -> str | None:
        return None

    def _owner(self) -> tuple[Any, str]:
        for name in _SCRIPTS:
            module = sys.modules.get(name)
            if module is not None and all(hasattr(module, tell) for tell in _TELLS):
                return module, self.target
        raise ImportError("hf_ptq is not loaded")


def _probe() -> bool:
    return PATCH.applied()  # calling it would parse this program's command line


PATCH: Patch = _ScriptPatch(
    name="skip-generate",
    package=PACKAGE,
    module="hf_ptq",
    target="parse_args",
    versions=VERSIONS,
    sources={},
    parameters=(),
    reason="hf_ptq generates a sample before quantizing and again after hours of calibration",
    upstream="an option of hf_ptq, off by default",
    wrap=_wrap,
    probe=_probe,
)
