"""All packages have one version, from one file, and pin each other to it."""

import importlib
import importlib.metadata
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
VERSION = (ROOT / "VERSION").read_text().strip()
TOOL = runpy.run_path(str(ROOT / "tools" / "version.py"))
PACKAGES: tuple[str, ...] = TOOL["PACKAGES"]


def project(package: str) -> dict[str, Any]:
    manifest = ROOT / "packages" / package / "pyproject.toml"
    table: dict[str, Any] = tomllib.loads(manifest.read_text())["project"]
    return table


def test_the_version_is_in_its_normal_form() -> None:
    assert str(Version(VERSION)) == VERSION


def test_every_package_of_the_workspace_is_covered() -> None:
    assert set(PACKAGES) == {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_manifest_agrees(package: str) -> None:
    assert project(package)["name"] == package
    assert project(package)["version"] == VERSION


@pytest.mark.parametrize("package", PACKAGES)
def test_pins_between_packages_are_exact(package: str) -> None:
    table = project(package)
    extras = table.get("optional-dependencies", {}).values()
    lines = [*table["dependencies"], *(line for extra in extras for line in extra)]
    ours = [needed for needed in map(Requirement, lines) if needed.name in PACKAGES]
    assert [str(needed.specifier) for needed in ours] == [f"=={VERSION}"] * len(ours)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_package_agrees(package: str) -> None:
    assert importlib.metadata.version(package) == VERSION
    assert importlib.import_module(package.replace("-", "_")).__version__ == VERSION


def test_writing_a_version_changes_the_version_and_the_pins_only() -> None:
    before = (
        '[project]\nversion = "1.0"\n'
        'dependencies = ["nvfp4-codec==1.0", "torch>=2.11"]\n'
        '[tool.x]\nminimum-version = "1.0"\n'
    )
    after = (
        '[project]\nversion = "2.0"\n'
        'dependencies = ["nvfp4-codec==2.0", "torch>=2.11"]\n'
        '[tool.x]\nminimum-version = "1.0"\n'
    )
    assert TOOL["stamped"](before, "2.0") == after


@pytest.mark.parametrize("text", ["", 'version = "1"\nversion = "1"\n'])
def test_a_manifest_without_one_version_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        TOOL["stamped"](text, "2.0")
