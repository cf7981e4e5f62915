"""NVRTC, the compiler that torch's own requirements bring: found, loaded and called by ctypes."""

from __future__ import annotations

import ctypes
import logging
import re
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path

from ..errors import CompileError
from .compiler import STANDARD, include_folders
from .targets import Target

logger = logging.getLogger(__name__)

_PACKAGE = re.compile(r"nvidia-cuda-nvrtc(-cu\d+)?", re.IGNORECASE)
_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)")
_BUILTINS = re.compile(r"libnvrtc-builtins\.so\.[\d.]+")
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
#: The first NVRTC with family targets (sm_100f).
_OLDEST = (12, 9)


class Nvrtc:
    """One loaded NVRTC. path: its library; version: that of its package, or as it says itself."""

    name = "nvrtc"

    def __init__(self, path: str, package_version: str | None = None) -> None:
        folder = Path(path).parent
        # NVRTC looks for its second half by name only, not beside itself.
        for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")):
            if folder.is_absolute() and _BUILTINS.fullmatch(builtins.name):
                ctypes.CDLL(str(builtins))
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        found = (major.value, minor.value)
        if found < _OLDEST:
            raise CompileError(
                f"{path} is NVRTC {found[0]}.{found[1]}, expected at least "
                f"{_OLDEST[0]}.{_OLDEST[1]}; install a torch built for CUDA 13"
            )
        self.version = package_version or f"{found[0]}.{found[1]}"

    def compile(self, name: str, text: str, target: Target, options: tuple[str, ...]) -> bytes:
        """Compile to a cubin; see Compiler. Functions without a specifier are device functions."""
        folders = include_folders(standard_library=False)
        arguments = [
            f"--gpu-architecture={target}",
            STANDARD,
            "--device-as-default-execution-space",
            *options,
            *(f"--include-path={folder}" for folder in folders),
        ]
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None
            )
        )
        try:
            encoded = (ctypes.c_char_p * len(arguments))(*map(str.encode, arguments))
            status = self._library.nvrtcCompileProgram(program, len(arguments), encoded)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if status != 0:
                raise CompileError(
                    f"NVRTC {self.version} does not compile {name} for {target}:\n{log}"
                )
            if log:
                logger.warning("NVRTC on %s for %s:\n%s", name, target, log)
            return self._read(program, "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _check(self, status: int) -> None:
        if status != 0:
            raise CompileError(f"NVRTC: {self._library.nvrtcGetErrorString(status).decode()}")


@cache
def find_nvrtc() -> Nvrtc:
    """The newest NVRTC of the installed packages, else the one that the loader finds.

    Raises CompileError if there is none.
    """
    found = [
        (int(match[1]), distribution.version, str(file.locate()))
        for distribution in distributions()
        if _PACKAGE.fullmatch(_name(distribution))
        for file in distribution.files or ()
        if (match := _LIBRARY.fullmatch(file.name))
    ]
    for _, version, path in sorted(found, reverse=True):
        return Nvrtc(path, version)
    for soname in _SONAMES:
        try:
            return Nvrtc(soname)
        except OSError:
            continue
    raise CompileError(
        "found no NVRTC: neither a package nvidia-cuda-nvrtc nor libnvrtc.so. A torch for CUDA "
        "from PyPI brings it; or: pip install nvidia-cuda-nvrtc"
    )


def _name(distribution: Distribution) -> str:
    # An interrupted installation leaves metadata without a name.
    return distribution.metadata["Name"] or ""
