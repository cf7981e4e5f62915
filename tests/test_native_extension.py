"""The codec falls back to pure Python where it cannot be compiled. That must not hide a failure."""

import importlib.metadata
import importlib.util
import shutil

import pytest


def test_the_extension_is_built_where_there_is_a_compiler() -> None:
    compilers = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    if not compilers:
        pytest.skip("needs a C++ compiler: found none of c++, g++, clang++ on PATH")
    try:
        importlib.metadata.version("nvfp4-codec")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs an installed nvfp4-codec: this one is a source tree on sys.path")
    assert importlib.util.find_spec("nvfp4_codec._native") is not None, (
        f"{compilers[0]} is there, but nvfp4-codec was installed as pure Python: its compilation "
        "failed. To see why: pip install -v ./packages/nvfp4-codec"
    )
