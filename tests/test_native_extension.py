"""Packages fall back to pure Python where they cannot be compiled. That must not hide a failure."""

import importlib.metadata
import importlib.util
import shutil

import pytest


@pytest.mark.parametrize("package", ["nvfp4-codec", "megamoe-kernel"])
def test_the_extension_is_built_where_there_is_a_compiler(package: str) -> None:
    compilers = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    if not compilers:
        pytest.skip("needs a C++ compiler: found none of c++, g++, clang++ on PATH")
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs an installed {package}: this one is a source tree on sys.path")
    assert importlib.util.find_spec(f"{package.replace('-', '_')}._native") is not None, (
        f"{compilers[0]} is there, but {package} was installed as pure Python: its compilation "
        f"failed. To see why: pip install -v ./packages/{package}"
    )
