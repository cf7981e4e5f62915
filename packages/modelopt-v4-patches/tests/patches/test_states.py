"""What each patch says of the versions at hand, and that it knows their sources."""

import dataclasses
import inspect
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest

from modelopt_v4_patches import apply_patches
from modelopt_v4_patches.errors import PatchError, VersionError
from modelopt_v4_patches.patch import Patch, source_hash
from modelopt_v4_patches.patches import PATCHES
from modelopt_v4_patches.registry import report_patches

BY_NAME = {patch.name: patch for patch in PATCHES}
IN_PACKAGES = [patch for patch in PATCHES if patch.name != "skip-generate"]


def needs_no_patch(name: str) -> bool:
    """Every other patch is needed in all tested versions."""
    fixed_in = {
        "rms-norm": ("transformers", (5, 20)),
        "activation-scale": ("nvidia-modelopt", (0, 47)),
    }
    if name not in fixed_in:
        return False
    package, first = fixed_in[name]
    return tuple(map(int, version(package).split(".")[:2])) >= first


def names(patch: Patch) -> str:
    return patch.name


@pytest.mark.parametrize("patch", IN_PACKAGES, ids=names)
def test_state_of_this_version(patch: Patch) -> None:
    fixed = needs_no_patch(patch.name)
    assert patch.unknown_version() is None
    assert patch.state() == ("fixed upstream" if fixed else "needed")
    assert (patch.fixed_upstream(), patch.needed()) == (fixed, not fixed)


@pytest.mark.parametrize("patch", IN_PACKAGES, ids=names)
def test_upstream_has_not_drifted(patch: Patch) -> None:
    function = patch.load()
    assert source_hash(function) in patch.sources, (
        f"{patch.package} {patch.version()} changed {patch.target}: read the new text, adapt the "
        f"patch if need be, and add {source_hash(function)!r} to its sources"
    )
    parameters = tuple(inspect.signature(function).parameters)
    assert parameters[: len(patch.parameters)] == patch.parameters


@pytest.mark.parametrize("patch", PATCHES, ids=names)
def test_says_why_and_when_it_can_go(patch: Patch) -> None:
    assert patch.reason
    assert patch.upstream


def other_source(*args: Any, **kwargs: Any) -> None:
    """Stands for what a later version has in place of a function."""


def test_a_changed_source_is_refused_before_anything_is_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        import_module("modelopt.torch.export.quant_utils"), "to_quantized_weight", other_source
    )
    with pytest.raises(
        VersionError,
        match="patch quantized-weight: to_quantized_weight of nvidia-modelopt .* never tested with",
    ):
        apply_patches()
    assert report_patches().in_state("applied") == ()
    assert report_patches().in_state("unknown version") == ("quantized-weight",)


def with_versions(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    changed = tuple(dataclasses.replace(patch, **changes) for patch in PATCHES)
    monkeypatch.setattr("modelopt_v4_patches.registry.PATCHES", changed)


def test_a_version_outside_the_range_is_refused_unless_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_versions(monkeypatch, versions=">=0.1,<0.2")
    with pytest.raises(VersionError, match=r"is outside >=0.1,<0.2; install a tested version, or"):
        apply_patches()
    assert report_patches().in_state("applied") == ()
    report = apply_patches(allow_unknown=True)
    assert len(report.in_state("applied")) >= 9


def test_allowing_unknown_versions_still_asks_for_the_same_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        import_module("modelopt.torch.export.quant_utils"), "to_quantized_weight", other_source
    )
    with pytest.raises(PatchError, match="takes args, kwargs; expected weight, weights_scaling"):
        apply_patches(allow_unknown=True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, package="no-such-package")
    with pytest.raises(VersionError, match="no-such-package is not installed: pip install"):
        apply_patches()
    assert set(report_patches().in_state("not installed")) == set(BY_NAME)


def test_a_module_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelopt.torch.export.moe_utils", None)
    with pytest.raises(VersionError, match=r"export.moe_utils cannot be used \(import of modelopt"):
        apply_patches()


def test_a_missing_function_is_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(import_module("modelopt.torch.export.moe_utils"), "_export_fused_experts")
    with pytest.raises(VersionError, match="has no modelopt.torch.export.moe_utils._export_fused"):
        apply_patches()
