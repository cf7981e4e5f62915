"""A checkout of Model-Optimizer, read before anything of it is executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from nvfp4_codec.checkpoint.header import shown

from ..errors import CalibrationError, VersionError

_PLACES: Final = ("examples/hf_ptq/hf_ptq.py", "examples/llm_ptq/hf_ptq.py")  # 0.46 on; 0.45
_HEADING = re.compile(r"^(0\.[0-9]+)(?:\.[0-9]+)? \(", re.MULTILINE)

#: The functions that are hooked or called, with their parameters.
SIGNATURES: Final = {
    "parse_args": (),
    "main": ("args",),
    "load_model": ("args",),
    "export_quantized": (
        "args", "full_model", "language_model", "model_type", "tokenizer",
        "default_padding_side", "default_pad_token",
    ),
}  # fmt: skip

#: Options of scripts/huggingface_example.sh that hf_ptq.py does not have or takes for others.
SHELL_NAMES: Final = {
    "--quant": "--qformat",
    "--kv_cache_quant": "--kv_cache_qformat",
    "--tp": "--inference_tensor_parallel",
    "--pp": "--inference_pipeline_parallel",
    "--sparsity": "--sparsity_fmt",
    "--calib": "--calib_size",
    "--calib_batch_size": "--batch_size",
    "--calib_dataset": "--dataset",
    "--batch": None,
    "--input": None,
    "--output": None,
    "--tasks": None,
    "--lm_eval_tasks": None,
    "--lm_eval_limit": None,
    "--simple_eval_tasks": None,
    "--simple_eval_limit": None,
    "--mmlu_limit": None,
    "--kv_cache_free_gpu_memory_fraction": None,
    "--vlm": None,
}


@dataclass(frozen=True)
class Script:
    """A checked hf_ptq.py: where it is, its release ("0.47"), and its ``__main__`` block."""

    path: Path
    release: str
    block: tuple[ast.stmt, ...]


def check_script(repo: Path) -> Script:
    """Finds hf_ptq.py and reads what this driver relies on, without executing it.

    Raises CalibrationError if there is none or it has changed, naming what.
    """
    path = next((repo / place for place in _PLACES if (repo / place).is_file()), None)
    if path is None:
        raise CalibrationError(
            f"{shown(str(repo))} has no {' or '.join(_PLACES)}: give a checkout of "
            "github.com/NVIDIA/Model-Optimizer."
        )
    changelog = repo / "CHANGELOG.rst"
    heading = _HEADING.search(changelog.read_text("utf-8")) if changelog.is_file() else None
    tree = ast.parse(path.read_text("utf-8"), str(path))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, parameters in SIGNATURES.items():
        function = functions.get(name)
        found = tuple(argument.arg for argument in function.args.args) if function else None
        if found != parameters:
            raise _drifted(path, f"{name}{parameters} is expected, found {found}")
    # Returning from the export hook must end the script.
    if not _calls(functions.get("post_quantize"), "export_quantized"):
        raise _drifted(path, "post_quantize no longer ends with export_quantized")
    blocks = [node.body for node in tree.body if isinstance(node, ast.If) and _is_main(node.test)]
    block = blocks[-1] if blocks else []
    if not block or ast.unparse(block[0]) != "args = parse_args()":
        raise _drifted(path, "__main__ no longer begins with args = parse_args()")
    if ast.unparse(block[-1]) != "main(args)":
        raise _drifted(path, "__main__ no longer ends with main(args)")
    return Script(path, heading[1] if heading else "unknown", tuple(block))


def check_release(script: Script) -> None:
    """Raises VersionError if the script's release is not that of the installed nvidia-modelopt."""
    installed = version("nvidia-modelopt")
    if script.release != ".".join(installed.split(".")[:2]):
        raise VersionError(
            f"{shown(str(script.path))} is of Model-Optimizer {script.release}, nvidia-modelopt "
            f"{installed} is installed: it would meet functions of another release. "
            f"`git checkout {installed}` there."
        )


def refuse_arguments(arguments: Sequence[str]) -> None:
    """Raises CalibrationError for option names of huggingface_example.sh."""
    for word in arguments:
        name = word.partition("=")[0]
        if name in SHELL_NAMES:
            ours = SHELL_NAMES[name]
            raise CalibrationError(
                f"{name} is an option of huggingface_example.sh; hf_ptq.py "
                + (f"calls it {ours}." if ours else "has none like it: leave it out.")
            )


def _is_main(test: ast.expr) -> bool:
    return ast.unparse(test) == "__name__ == '__main__'"


def _calls(function: ast.FunctionDef | None, name: str) -> bool:
    """Whether the last statement of a function is a call of ``name``."""
    last = function.body[-1] if function else None
    call = last.value if isinstance(last, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) == name


def _drifted(path: Path, what: str) -> CalibrationError:
    return CalibrationError(
        f"{shown(str(path))}: {what}. This release of modelopt-v4-patches does not know that "
        "version of hf_ptq.py; use a tested one (0.45, 0.46, 0.47)."
    )
