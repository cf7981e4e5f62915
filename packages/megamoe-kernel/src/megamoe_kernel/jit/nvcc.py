"""nvcc of a CUDA toolkit, for who asks for it by name."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..errors import CompileError
from .compiler import STANDARD, include_folders
from .targets import Target


class Nvcc:
    """One nvcc. path: the program; by default the one on PATH."""

    name = "nvcc"

    def __init__(self, path: str = "nvcc") -> None:
        found = shutil.which(path)
        if found is None:
            raise CompileError(f"found no {path}: install a CUDA toolkit, or use compiler='nvrtc'")
        self.path = found
        said = _run([found, "--version"]).stdout
        match = re.search(r"\bV(\d+\.\d+\.\d+)", said)
        if match is None:
            raise CompileError(f"{found} --version says {said!r}, expected a version like V13.0.88")
        self.version = match[1]

    def compile(self, name: str, text: str, target: Target, options: tuple[str, ...]) -> bytes:
        """Compile to a cubin; see Compiler."""
        folders = include_folders(standard_library=True)
        with tempfile.TemporaryDirectory() as scratch:
            source, cubin = Path(scratch, f"{name}.cu"), Path(scratch, "out.cubin")
            source.write_text(text)
            command = [
                *(self.path, "-cubin", f"-arch={target}", STANDARD, "--expt-relaxed-constexpr"),
                *options,
                *(f"-I{folder}" for folder in folders),
                *("-o", str(cubin), str(source)),
            ]
            result = _run(command)
            if result.returncode != 0:
                raise CompileError(
                    f"nvcc {self.version} does not compile {name} for {target}:\n{result.stderr}"
                )
            return cubin.read_bytes()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True)
