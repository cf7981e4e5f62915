"""hf_ptq as a loaded module; the script itself is not in modelopt's wheel."""

import argparse
import sys
from types import ModuleType

import pytest

from modelopt_v4_patches import apply_patches
from modelopt_v4_patches.errors import PatchError
from modelopt_v4_patches.patches.skip_generate import PATCH, force_skip_generate
from modelopt_v4_patches.registry import revert_patches


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("hf_ptq")

    def parse_args() -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        parser.add_argument("--skip_generate", action="store_true")
        return parser.parse_args([])

    vars(module).update(parse_args=parse_args, export_quantized=None, post_quantize=None)
    monkeypatch.setitem(sys.modules, "hf_ptq", module)
    return module


def test_waits_for_the_script_and_never_imports_it() -> None:
    assert PATCH.state() == "not loaded"
    assert "skip-generate" in apply_patches().in_state("not loaded")
    assert "hf_ptq" not in sys.modules


def test_parsed_arguments_skip_the_generation(script: ModuleType) -> None:
    assert PATCH.state() == "needed"
    assert not script.parse_args().skip_generate
    assert "skip-generate" in apply_patches().in_state("applied")
    assert script.parse_args().skip_generate
    revert_patches()
    assert not script.parse_args().skip_generate


def test_a_program_that_is_a_copy_of_the_script(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "hf_ptq")
    monkeypatch.setitem(sys.modules, "__main__", script)
    apply_patches()
    assert script.parse_args().skip_generate
    revert_patches()


def test_another_scripts_arguments_are_refused() -> None:
    with pytest.raises(PatchError, match="have no skip_generate"):
        force_skip_generate(argparse.Namespace())
