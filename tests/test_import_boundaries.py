"""Imports between the packages go one way: everything may import the codec, nothing else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "nvfp4-codec": "nvfp4_codec",
    "modelopt-v4-patches": "modelopt_v4_patches",
    "vllm-dsv4": "vllm_dsv4",
    "megamoe-kernel": "megamoe_kernel",
}
CODEC = "nvfp4_codec"


def imported_modules(source: str) -> Iterator[str]:
    """Yield the top-level name of everything a source imports, import_module("...") included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value).partition(".")[0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import vllm_dsv4.plugin as p", {"vllm_dsv4"}),
        ("def f():\n    from megamoe_kernel import api", {"megamoe_kernel"}),
        ("importlib.import_module('vllm_dsv4.plugin')", {"vllm_dsv4"}),
        ("from . import ops\nfrom .checkpoint import reader", set()),
    ],
)
def test_every_form_of_import_is_seen(source: str, expected: set[str]) -> None:
    assert set(imported_modules(source)) == expected


@pytest.mark.parametrize("package", MODULES)
def test_package_imports_only_the_codec(package: str) -> None:
    own = MODULES[package]
    sources = sorted((ROOT / "packages" / package / "src").rglob("*.py"))
    assert sources
    forbidden = set(MODULES.values()) - {own, CODEC}
    for source in sources:
        found = forbidden & set(imported_modules(source.read_text()))
        assert not found, f"{source.relative_to(ROOT)} imports {', '.join(found)}"


@pytest.mark.parametrize("package", MODULES)
def test_package_requires_only_the_codec(package: str) -> None:
    manifest = (ROOT / "packages" / package / "pyproject.toml").read_text()
    others = set(MODULES) - {package, "nvfp4-codec"}
    assert not [name for name in others if f'"{name}' in manifest]
    if package != "nvfp4-codec":
        assert '"nvfp4-codec==' in manifest
