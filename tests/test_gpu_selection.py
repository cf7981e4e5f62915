"""`pytest -m gpu` and `--full`: what the root conftest collects and skips, and why it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

GPU_TEST = """
import pytest

@pytest.mark.gpu
def test_on_any_gpu(): pass

@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_on_two_gpus(): pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the repository's pytest configuration and three small test files."""
    for name in ("conftest.py", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    folder = tmp_path / "tests"
    (folder / "gpu").mkdir(parents=True)
    (folder / "gpu" / "test_kernels.py").write_text(GPU_TEST)
    (folder / "test_peer.py").write_text("import a_peer_that_is_not_installed\n")
    (folder / "test_long.py").write_text(
        "import pytest\n\n@pytest.mark.full\ndef test_long(): pass\n"
    )
    return tmp_path


def run_pytest(checkout: Path, *arguments: str) -> tuple[int, str]:
    """Run pytest with no plugin loaded and no GPU visible."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for inherited in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        environment.pop(inherited, None)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=checkout,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout + result.stderr


def test_gpu_tests_are_collected_without_the_peers_and_skip_by_name(checkout: Path) -> None:
    code, output = run_pytest(checkout, "-m", "gpu")
    assert code == 0, output
    assert "2 skipped" in output
    assert "needs an NVIDIA GPU: torch.cuda.is_available() is False" in output


def test_everything_else_is_collected_otherwise(checkout: Path) -> None:
    code, output = run_pytest(checkout, "-m", "not gpu")
    assert code == 2, output
    assert "a_peer_that_is_not_installed" in output


@pytest.mark.parametrize(
    ("flags", "outcome"), [([], "1 skipped"), (["--full"], "1 passed")], ids=["everyday", "full"]
)
def test_long_tests_run_only_when_asked(checkout: Path, flags: list[str], outcome: str) -> None:
    code, output = run_pytest(checkout, "tests/test_long.py", *flags)
    assert code == 0, output
    assert outcome in output


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.gpuu\ndef test_x(): pass",
        "import warnings\ndef test_x(): warnings.warn('w')",
        "@pytest.mark.xfail\ndef test_x(): pass",
    ],
    ids=["unknown marker", "warning", "passing xfail"],
)
def test_sloppiness_fails(checkout: Path, source: str) -> None:
    (checkout / "tests" / "test_sloppy.py").write_text(f"import pytest\n\n{source}\n")
    code, output = run_pytest(checkout, "tests/test_sloppy.py")
    assert code != 0, output
