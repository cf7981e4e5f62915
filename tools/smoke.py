"""Use an installed nvfp4-codec: what check_packages.py runs in each clean environment.

`--backend` names the backend that the installation must choose by itself on the CPU.
"""

import argparse
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

OTHERS = ("modelopt-v4-patches", "vllm-dsv4", "megamoe-kernel")


class Recorder(logging.Handler):
    """Keeps the warnings that it gets."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("native", "reference"), required=True)
    parser.add_argument("--version", required=True)
    arguments = parser.parse_args()

    recorder = Recorder()
    logging.getLogger("nvfp4_codec").addHandler(recorder)

    import torch

    import nvfp4_codec

    expect("version", nvfp4_codec.__version__, arguments.version)
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    expect("other packages of this workspace", installed & set(OTHERS), set())

    has_native = importlib.util.find_spec("nvfp4_codec._native") is not None
    expect("native extension present", has_native, arguments.backend == "native")

    torch.manual_seed(0)
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    quantized = nvfp4_codec.quantize_nvfp4(x)
    restored = nvfp4_codec.dequantize_nvfp4(*quantized)
    error = ((restored - x).float().norm() / x.float().norm()).item()
    expect("relative round-trip error below 0.15", 0 < error < 0.15, True)
    expected = nvfp4_codec.quantize_nvfp4(x, backend="reference")
    expect("same bytes as the reference", bool((expected.weight == quantized.weight).all()), True)

    expect("warnings", len(recorder.messages), 0 if arguments.backend == "native" else 1)

    command = str(Path(sys.executable).parent / "nvfp4")
    help_text = subprocess.run(
        [command, "--help"], check=True, capture_output=True, text=True
    ).stdout
    expect("nvfp4 --help names quantize", "quantize" in help_text, True)
    print(f"{arguments.backend} backend ok, error {error:.4f}", *recorder.messages)
    return 0


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SystemExit(f"{what}: found {found!r}, expected {wanted!r}")


if __name__ == "__main__":
    sys.exit(main())
