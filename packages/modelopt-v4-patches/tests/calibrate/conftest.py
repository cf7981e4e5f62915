"""The tiny DeepSeek-V4 in BF16, and a few texts to calibrate it on."""

import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from modelopt_v4_patches.dequantize import dequantize_checkpoint
from modelopt_v4_patches.snapshot import FORMAT, VERSION

FAKE = Path(__file__).with_name("fake")
TINY = Path(__file__).resolve().parents[4] / "tests/assets/tiny-dsv4"


@pytest.fixture(scope="session")
def official() -> Path:
    return TINY


@pytest.fixture(scope="session")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate") / "bf16"
    dequantize_checkpoint(TINY, folder)
    return folder


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """One token per byte; all longer than the sequences, so that every tool cuts them alike."""
    folder = Path(json.__file__).parent
    return [(folder / name).read_text() for name in ("decoder.py", "encoder.py", "scanner.py")]


@pytest.fixture(scope="session")
def jsonl(texts: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "three.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def metadata() -> dict[str, str]:
    """What a snapshot without quantizers says of itself."""
    return {
        "format": FORMAT, "version": VERSION, "modelopt": "0.47.0", "transformers": "5.20.2",
        "torch": "2.14.0", "config_sha256": "0" * 64, "dataset": "three.jsonl",
        "num_samples": "3", "sequence_length": "160", "kv_cache": "fp8_cast", "qformat": "nvfp4",
        "quantizers": "{}", "unseen_experts": "[]", "complete": "true",
    }  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkout of Model-Optimizer, of the installed release if none is named.

    ``changes`` are (old, new) in its hf_ptq.py.
    """

    def write(*changes: tuple[str, str], release: str | None = None) -> Path:
        release = release or ".".join(version("nvidia-modelopt").split(".")[:2])
        folder = tmp_path / "repo/examples" / ("llm_ptq" if release == "0.45" else "hf_ptq")
        folder.mkdir(parents=True)
        script = (FAKE / "hf_ptq.py").read_text()
        for old, new in changes:
            assert old in script
            script = script.replace(old, new)
        (folder / "hf_ptq.py").write_text(script)
        (folder / "sibling.py").write_text((FAKE / "sibling.py").read_text())
        (tmp_path / "repo/CHANGELOG.rst").write_text(f"Changelog\n===\n\n{release} (2026-xx-xx)\n")
        return tmp_path / "repo"

    return write
