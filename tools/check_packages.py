"""Install what build_packages.py made, each into a clean environment, and use it there.

The codec's wheels on every Python, alone; its sdist where there is no compiler; the other
packages with the codec beside them, megamoe-kernel both ways too. Nothing of the checkout is on any
path.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_packages import DIST, NATIVE, distribution_name, sdist_of
from interpreters import find_interpreters
from version import PACKAGES, ROOT, read_version

CONSTRAINTS = f"--constraints={ROOT / 'constraints.txt'}"
BUILD_CONSTRAINTS = f"--build-constraints={ROOT / 'constraints.txt'}"
SMOKE = ROOT / "tools" / "smoke.py"

# CMake looks into /usr/bin even when PATH does not name it. Switched off, the machine has no
# compiler for all that a build can see.
NO_COMPILER = {"CMAKE_ARGS": "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF"}
CODEC, KERNEL = NATIVE
COMMANDS = {"modelopt-v4-patches": "dsv4-quantize", KERNEL: "megamoe"}
UNSET = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "VIRTUAL_ENV", "PYTHONPATH", "CMAKE_GENERATOR")


class Environment:
    """A virtual environment in its own temporary folder."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        self.uv = _which_uv()
        self.run(self.uv, "venv", "--quiet", "--python", str(python), str(folder / "venv"))
        self.python = folder / "venv" / "bin" / "python"

    def run(self, *command: str, env: dict[str, str] | None = None) -> str:
        """Run a command inside the folder; when it fails, stop with its output."""
        environment = {key: value for key, value in os.environ.items() if key not in UNSET}
        result = subprocess.run(
            command, cwd=self.folder, check=False, text=True, env={**environment, **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if result.returncode != 0:
            raise SystemExit(f"{result.stdout}\n{' '.join(command)} failed")
        return result.stdout

    def install(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        pip = [self.uv, "pip", "install", "--python", str(self.python)]
        return self.run(*pip, CONSTRAINTS, BUILD_CONSTRAINTS, *arguments, env=env)

    def smoke(self, *arguments: str) -> str:
        """Run tools/smoke.py isolated: no PYTHONPATH, no current folder, no user site."""
        return self.run(str(self.python), "-I", str(SMOKE), *arguments).strip()


def _which_uv() -> str:
    # By its absolute path, since one of the checks empties PATH.
    from shutil import which

    found = which("uv")
    if found is None:
        raise SystemExit("uv is not on PATH")
    return found


def check_codec_wheel(wheel: Path, python: Path, folder: Path) -> str:
    environment = Environment(folder, python)
    environment.install(str(wheel))
    return environment.smoke("--backend=native", f"--version={read_version()}")


def check_codec_without_compiler(python: Path, folder: Path) -> str:
    """Install the sdist with an empty PATH: no compiler, no cmake, no ninja, no make."""
    environment = Environment(folder, python)
    empty = folder / "empty"
    empty.mkdir()
    install_without_compiler(environment, CODEC, empty)
    return environment.smoke("--backend=reference", f"--version={read_version()}")


def install_without_compiler(environment: Environment, package: str, empty: Path) -> None:
    # Refresh: uv might hand out a wheel that it built from this sdist with a compiler.
    without = {"PATH": str(empty), **NO_COMPILER}
    options = (f"--refresh-package={package}", *(["--no-deps"] if package == KERNEL else []))
    environment.install(*options, str(sdist_of(package)), env=without)


# One layout, from the extension or, with one warning, from the header; and no torch for either.
KERNEL_SMOKE = """
import logging, sys
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("megamoe_kernel").addHandler(handler)
from megamoe_kernel import buffer_layout as b, native as n
sizes = b.BufferSizes(*range(1, 13))
assert b.buffer_layout(sizes) == b.buffer_layout(sizes) == b.layout_of_header(sizes)
native = n.import_error is None
assert native == (sys.argv[1] == "native") and len(messages) == (not native), (native, messages)
print("megamoe_kernel", sys.argv[1], *messages)
"""


def check_kernel(environment: Environment, kind: str) -> None:
    python = str(environment.python)
    print(" ", environment.run(python, "-I", "-c", KERNEL_SMOKE, kind).strip(), flush=True)


def check_others(codec: Path, kernel: Path, python: Path, folder: Path) -> None:
    """Install the other packages beside the codec, import them, and ask their commands for help.

    vllm and torch are not installed for that: whether vllm's requirements can be met is
    answered by a dry run, which resolves and downloads nothing. That imports and help work
    without torch is part of what is checked.
    """
    environment = Environment(folder, python)
    environment.install("--no-deps", str(codec))
    environment.install("numpy", "rich")
    for package in PACKAGES:
        if package == CODEC:
            continue
        name = distribution_name(package)
        (wheel,) = [kernel] if package == KERNEL else DIST.glob(f"{name}-*.whl")
        environment.install("--dry-run", str(codec), str(wheel))
        environment.install("--no-deps", str(wheel))
        code = (
            f"import {name}; assert {name}.__version__ == {read_version()!r}; print({name!r}, 'ok')"
        )
        print(" ", environment.run(str(environment.python), "-I", "-c", code).strip(), flush=True)
        if (command := COMMANDS.get(package)) is not None:
            environment.run(str(environment.python.with_name(command)), "--help")
    check_kernel(environment, "native")
    empty = folder / "empty"
    empty.mkdir()
    install_without_compiler(environment, KERNEL, empty)
    check_kernel(environment, "pure")


def main() -> int:
    pythons = {version: path for version, path in find_interpreters().items() if path is not None}
    codec_wheels = {version: wheel_of(CODEC, version) for version in pythons}
    version, python = next(iter(pythons.items()))
    with tempfile.TemporaryDirectory() as scratch:
        # Two at a time: each installs torch and imports it for the first time.
        with ThreadPoolExecutor(2) as pool:
            checks = {
                f"{wheel.name}, alone": pool.submit(
                    check_codec_wheel, wheel, pythons[tag], _folder(scratch, *tag)
                )
                for tag, wheel in codec_wheels.items()
            }
            checks["the codec's sdist, without a compiler"] = pool.submit(
                check_codec_without_compiler, python, _folder(scratch, "pure")
            )
            for name, check in checks.items():
                print(f"{name}\n  {check.result()}", flush=True)
        print("the other packages")
        kernel = wheel_of(KERNEL, version)
        check_others(codec_wheels[version], kernel, python, _folder(scratch, "others"))
    return 0


def wheel_of(package: str, version: tuple[int, int]) -> Path:
    """Return the one wheel of a native package for this Python."""
    tag = "cp{}{}".format(*version)
    (wheel,) = DIST.glob(f"{distribution_name(package)}-*-{tag}-{tag}-*.whl")
    return wheel


def _folder(scratch: str, *parts: object) -> Path:
    folder = Path(scratch, "-".join(map(str, parts)))
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
