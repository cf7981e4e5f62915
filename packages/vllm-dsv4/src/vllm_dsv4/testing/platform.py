"""A stand-in for vLLM's CUDA platform on a machine without a GPU, to build and load models only.

vLLM finds it through its own entry-point group ``vllm.platform_plugins``: `environment` writes a
distribution that advertises it into a folder and returns the variables that put that folder on
the path. So it also reaches the processes that vLLM starts, such as the one that inspects model
classes. vLLM's compiled modules link against ``libcuda.so.1``: where there is none, a library of
functions that all answer "not available" stands in. Nothing can be run on this platform.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

NAME: Final = "vllm_dsv4_stand_in"

#: The driver functions that vLLM 0.33's compiled modules and their dependencies import.
_DRIVER: Final = (
    "cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion", "cuGetErrorString", "cuGetProcAddress_v2", "cuMemAddressFree",
    "cuMemAddressReserve", "cuMemCreate", "cuMemGetAllocationGranularity", "cuMemMap",
    "cuMemRelease", "cuMemSetAccess", "cuMemUnmap", "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
)  # fmt: skip
_NO_DEVICE: Final = 100  # CUDA_ERROR_NO_DEVICE
_LIBRARY: Final = "DSV4_STAND_IN_LIBCUDA"


class StandInError(RuntimeError):
    """The stand-in platform cannot be set up on this machine."""


def environment(folder: Path, *, plugins: tuple[str, ...] = ("vllm_dsv4",)) -> dict[str, str]:
    """The environment variables for a process that shall run on the stand-in platform.

    Args:
        folder: takes the distribution, the driver's stand-in and vLLM's caches.
        plugins: vLLM's general plugins to load; () is vLLM as it comes.

    Raises:
        StandInError: there is no libcuda.so.1 and no C compiler either.
    """
    distribution = folder / f"{NAME}-0.dist-info"
    distribution.mkdir(parents=True, exist_ok=True)
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    entry_point = f"[vllm.platform_plugins]\n{NAME} = {__name__}:activate\n"
    (distribution / "entry_points.txt").write_text(entry_point)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    library = "" if _has_driver() else str(_driver_stand_in(folder))
    return {
        "PYTHONPATH": path,
        "VLLM_PLUGINS": ",".join((NAME, *plugins)),
        _LIBRARY: library,
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        # Else its import starts two compilations in the background, here in every fork.
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def activate() -> str:
    """Called by vLLM when it looks for its platform; returns where the class is."""
    if library := os.environ.get(_LIBRARY):
        # Its name within is libcuda.so.1, which satisfies whatever is loaded after it.
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    return f"{__package__}.stand_in.StandInPlatform"


def _has_driver() -> bool:
    command = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def _driver_stand_in(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise StandInError(
            "there is no NVIDIA driver (libcuda.so.1) and no C compiler to make a stand-in for it: "
            "install cc"
        )
    source, library = folder / "libcuda.c", folder / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in _DRIVER))
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True)
    return library
