"""One kernel for one target: from the cache, or compiled and put there."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from typing import Literal

from ..buffer_layout import INCLUDE
from ..errors import ArchitectureError, CompileError
from .cache import CubinCache
from .compiler import Compiler
from .cubin import check_cubin
from .nvcc import Nvcc
from .nvrtc import find_nvrtc
from .targets import Target

CompilerName = Literal["nvrtc", "nvcc"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelSource:
    """A device function and the constants it is compiled with.

    name: the entry point. header: where the function is, below the include folder. function: its
    name with template arguments. arguments: the struct that it takes by value, its only parameter.
    threads: of a CTA. targets: those that it is written for. block_rows: tokens of a block, which
    tells the kernels of a layer apart; 0 where there are no blocks.
    """

    name: str
    header: str
    function: str
    arguments: str
    threads: int
    targets: tuple[Target, ...]
    block_rows: int = 0

    @property
    def text(self) -> str:
        """The whole translation unit."""
        return (
            f'#include "{self.header}"\n\n'
            f'extern "C" __global__ void __launch_bounds__({self.threads}, 1)\n'
            f"{self.name}(const __grid_constant__ {self.arguments} arguments) {{\n"
            f"  {self.function}(arguments);\n"
            "}\n"
        )


@dataclass(frozen=True)
class Compiled:
    """A cubin, whether the cache had it, and how long it took to get."""

    cubin: bytes
    cached: bool
    seconds: float


def compile_kernel(
    source: KernelSource,
    target: Target,
    *,
    compiler: CompilerName = "nvrtc",
    cache: CubinCache | None = None,
    options: tuple[str, ...] = (),
) -> Compiled:
    """Compile a kernel unless the cache has it; needs no GPU.

    compiler: "nvrtc", or "nvcc" of a toolkit on PATH. cache: by default the user's. options: more
    options of the compiler. Raises ArchitectureError for a target that the kernel is not written
    for, CompileError, CacheError.
    """
    if target not in source.targets:
        raise ArchitectureError(
            f"{source.name} is written for {', '.join(source.targets)}, not for {target}"
        )
    if compiler not in ("nvrtc", "nvcc"):
        raise CompileError(f"compiler is {compiler!r}, expected 'nvrtc' or 'nvcc'")
    chosen: Compiler = find_nvrtc() if compiler == "nvrtc" else Nvcc()
    cache = cache or CubinCache()
    parts = {
        "kernel": source.name,
        "text": source.text,
        "headers": headers_hash(),
        "options": " ".join(options),
        "target": target,
        "compiler": f"{chosen.name} {chosen.version}",
    }

    def make() -> bytes:
        logger.info("compiling %s for %s with %s", source.name, target, parts["compiler"])
        cubin = chosen.compile(source.name, source.text, target, options)
        check_cubin(cubin, target)
        return cubin

    start = time.perf_counter()
    cubin, cached = cache.get(parts, make)
    return Compiled(cubin, cached, time.perf_counter() - start)


def headers_hash() -> str:
    """A hash of all device headers, names and contents."""
    digest = hashlib.sha256()
    for path in sorted(INCLUDE.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(INCLUDE).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()
