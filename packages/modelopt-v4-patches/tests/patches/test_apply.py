"""Applying: every patch takes, everywhere its target is held; twice is once; all of it reverts."""

import ast
import dataclasses
import sys
import threading
from collections.abc import Iterator
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from modelopt_v4_patches import apply_patches
from modelopt_v4_patches.errors import PatchError
from modelopt_v4_patches.patch import Patch
from modelopt_v4_patches.patches import PATCHES
from modelopt_v4_patches.registry import report_patches, revert_patches

UNITS = [patch for patch in PATCHES if patch.name != "skip-generate"]
FUNCTIONS = [patch for patch in UNITS if "." not in patch.target]


def names(patch: Patch) -> str:
    return patch.name


@pytest.mark.parametrize("patch", UNITS, ids=names)
def test_brings_what_upstream_lacks(patch: Patch) -> None:
    """The probe, often of a stand-in for a GPU tensor, fails without the patch, holds with it."""
    if patch.fixed_upstream():
        assert not patch.needed()
        patch.apply()
        assert patch.state() == "fixed upstream"  # nothing to do, nothing done
        return
    assert patch.needed()
    patch.apply()
    assert not patch.needed()
    patch.check()
    assert patch.state() == "applied"
    patch.revert()
    assert patch.needed()
    assert patch.state() == "needed"


def test_all_apply_together_and_twice_is_once() -> None:
    before = [patch.load() for patch in PATCHES]
    needed = report_patches().in_state("needed")
    report = apply_patches()
    assert report.in_state("applied") == needed
    assert not report.in_state("needed")
    patched = [patch.load() for patch in PATCHES]
    assert apply_patches() == report
    assert [patch.load() for patch in PATCHES] == patched
    assert "export-weight: applied (_export_quantized_weight, nvidia-modelopt 0." in str(report)
    revert_patches()
    assert [patch.load() for patch in PATCHES] == before
    revert_patches()
    assert report_patches().in_state("needed") == needed


def test_threads_apply_once() -> None:
    reports, threads = [], []
    for _ in range(2):
        threads.append(threading.Thread(target=lambda: reports.append(apply_patches())))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(reports) == 2
    for patch in UNITS:
        if patch.applied():
            assert not hasattr(patch.load().__wrapped__, "_dsv4_patch")


def importers(patch: Patch) -> Iterator[tuple[str, str]]:
    """Every module of modelopt whose text imports the target by name, and the name it gives it."""
    spec = find_spec("modelopt")
    assert spec is not None
    (root,) = spec.submodule_search_locations or ()
    for path in sorted(Path(root).rglob("*.py")):
        text = path.read_text()
        if patch.target not in text:
            continue
        module = ".".join(("modelopt", *path.relative_to(root).with_suffix("").parts))
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == patch.target:
                        yield module.removesuffix(".__init__"), alias.asname or alias.name


# Which modules import each function by name: not the same ones in every version.
EXPORT = "modelopt.torch.export."
MODULES = {
    "fused-experts": {"0.45": {"unified_export_hf"}, "later": {"hf_export_handlers"}},
    "weight-scale": {"0.45": {"unified_export_hf", "layer_utils"}},
    "quantized-weight": {"0.45": {"unified_export_hf", "model_config_utils"}},
}


@pytest.mark.parametrize("patch", FUNCTIONS, ids=names)
def test_reaches_every_module_that_imported_the_name(patch: Patch) -> None:
    held = dict(importers(patch))
    expected = MODULES.get(patch.name, {})
    minor = "0.45" if version("nvidia-modelopt").startswith("0.45.") else "later"
    for name in expected.get(minor, expected.get("0.45", set())):
        assert f"{EXPORT}{name}" in held
    loaded = {m: name for m, name in held.items() if m in sys.modules}
    original = patch.load()
    assert all(vars(sys.modules[module])[name] is original for module, name in loaded.items())
    apply_patches()
    assert all(vars(sys.modules[module])[name] is patch.load() for module, name in loaded.items())
    assert patch.load() is not original
    revert_patches()
    assert all(vars(sys.modules[module])[name] is original for module, name in loaded.items())


def test_reaches_scripts_that_imported_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "from modelopt.torch.export.unified_export_hf import _export_quantized_weight as pack\n"
    for name in ("imported_before", "imported_after"):
        (tmp_path / f"{name}.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    before = import_module("imported_before")
    original = before.pack
    apply_patches()
    after = import_module("imported_after")
    assert before.pack is after.pack
    assert before.pack.__wrapped__ is original
    revert_patches()
    assert before.pack is after.pack is original
    for name in ("imported_before", "imported_after"):
        monkeypatch.delitem(sys.modules, name)


def test_check_finds_a_module_that_still_has_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = next(patch for patch in PATCHES if patch.name == "quantized-weight")
    original = patch.load()
    apply_patches()
    late = ModuleType("late_script")
    monkeypatch.setitem(sys.modules, "late_script", late)
    late.pack = original  # type: ignore[attr-defined]  # from a reference kept elsewhere
    with pytest.raises(PatchError, match="still unpatched: late_script.pack"):
        patch.check()
    apply_patches()  # again: now it is seen
    patch.check()
    assert late.pack is patch.load()  # type: ignore[attr-defined]


def test_check_without_the_patch_fails() -> None:
    for patch in PATCHES:
        with pytest.raises(PatchError, match="is not patched"):
            patch.check()


def test_check_finds_a_patch_without_effect() -> None:
    patch = next(patch for patch in PATCHES if patch.name == "export-amax")
    idle = dataclasses.replace(patch, wrap=lambda original: lambda *args: original(*args))
    before = patch.load()
    with pytest.raises(PatchError, match="export-amax: TensorQuantizer.export_amax "):
        idle.apply()
    assert patch.load() is before


def test_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    *others, last = PATCHES
    broken = dataclasses.replace(last, wrap=lambda original: lambda *args: original(*args))
    monkeypatch.setattr("modelopt_v4_patches.registry.PATCHES", (*others, broken))
    with pytest.raises(PatchError, match="patch quantized-weight"):
        apply_patches()
    assert report_patches().in_state("applied") == ()


def test_a_default_device_of_the_script_does_not_matter() -> None:
    with torch.device("meta"):
        report = apply_patches()
    assert "quantizer-forward" in report.in_state("applied")


def test_someone_elses_wrapper_on_top_is_seen_and_not_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = import_module("modelopt.torch.export.quant_utils")
    apply_patches()
    ours = module.to_quantized_weight

    @wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    monkeypatch.setattr(module, "to_quantized_weight", theirs)
    assert "quantized-weight" in apply_patches().in_state("applied")
    with pytest.raises(PatchError, match="something else wraps to_quantized_weight now"):
        revert_patches()
    monkeypatch.undo()
    revert_patches()
