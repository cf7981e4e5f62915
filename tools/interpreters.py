"""Find the Python interpreters that the packages are built for."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SUPPORTED = ((3, 11), (3, 12), (3, 13))


def find_interpreters() -> dict[tuple[int, int], Path | None]:
    """Return for each supported version an interpreter that runs, or None.

    Looks at the running interpreter, then at pythonX.Y on PATH, then into pyenv's versions.
    """
    return {version: _find(version) for version in SUPPORTED}


def _find(version: tuple[int, int]) -> Path | None:
    return next((path for path in _candidates(version) if _runs_as(path, version)), None)


def _candidates(version: tuple[int, int]) -> Iterator[Path]:
    if sys.version_info[:2] == version:
        yield Path(sys._base_executable)  # type: ignore[attr-defined]  # outlives this venv
    name = f"python{version[0]}.{version[1]}"
    for folder in os.get_exec_path():
        if found := shutil.which(name, path=folder):
            yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = pyenv.glob(f"versions/{version[0]}.{version[1]}.*/bin/python")
    yield from sorted(installed, key=_numbers, reverse=True)


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parent.parent.name)]


def _runs_as(path: Path, version: tuple[int, int]) -> bool:
    """A pyenv shim exists for versions that are not active, and fails when it is run."""
    probe = "import sys, venv; print(*sys.version_info[:2])"
    try:
        result = subprocess.run(
            [str(path), "-I", "-c", probe], check=False, capture_output=True, text=True, timeout=60
        )
    except OSError:
        return False
    return result.returncode == 0 and result.stdout.split() == [str(part) for part in version]
