"""``import nvfp4_codec`` costs milliseconds, and every public name is where it is said to be."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nvfp4_codec


def test_every_public_name_resolves_and_is_listed() -> None:
    assert set(nvfp4_codec._HOMES) <= set(nvfp4_codec.__all__)
    for name in nvfp4_codec.__all__:
        assert getattr(nvfp4_codec, name) is not None
        assert name in dir(nvfp4_codec)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        nvfp4_codec.nope  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    script = f"import sys; sys.path[:] = {sys.path!r}; import nvfp4_codec, nvfp4_codec.cli\n"
    subprocess.run([sys.executable, "-c", f"{script}assert 'torch' not in sys.modules"], check=True)
