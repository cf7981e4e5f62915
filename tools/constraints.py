"""Write constraints.txt, the hashed versions of everything the workspace may install.

The resolution starts from the pyproject files alone (never from a local uv.lock), in a temporary
copy, so the same inputs give the same file on every machine. `--check` only compares.
"""

import argparse
import difflib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "constraints.txt"

HEADER = """\
# Exact versions and hashes of everything this workspace installs, for Linux on x86_64 and
# aarch64, Python 3.11 to 3.13. Written by tools/constraints.py from the pyproject files; do not
# edit. Regenerate: python3 dev.py constraints
"""

# uv repeats the workspace's supported platforms on nearly every line. They are stated once, in
# the header, so that what is left of a marker says something.
_PLATFORMS = (
    "((platform_machine == 'aarch64' and sys_platform == 'linux')"
    " or (platform_machine == 'x86_64' and sys_platform == 'linux'))"
)
_NOISE = (
    f" ; python_full_version < '3.14' and {_PLATFORMS}",
    f" and python_full_version < '3.14' and {_PLATFORMS}",
    f" and {_PLATFORMS}",
)


def resolve() -> str:
    """Return the text that constraints.txt must have."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for manifest in [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]:
            target = copy / manifest.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(manifest, target)
        _uv("lock", "--quiet", directory=copy)
        exported = _uv(
            *("export", "--quiet", "--frozen", "--format=requirements-txt"),
            *("--all-packages", "--all-extras", "--all-groups", "--no-emit-workspace"),
            *("--no-header", "--no-annotate", "--no-emit-index-url"),
            directory=copy,
        )
    for noise in _NOISE:
        exported = exported.replace(noise, "")
    return HEADER + exported


def _uv(*arguments: str, directory: Path) -> str:
    command = ["uv", *arguments]
    result = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr}")
    return result.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the file, write nothing")
    check: bool = parser.parse_args().check

    expected = resolve()
    found = OUTPUT.read_text() if OUTPUT.exists() else ""
    if expected == found:
        return 0
    if not check:
        OUTPUT.write_text(expected)
        return 0
    diff = difflib.unified_diff(
        found.splitlines(),
        expected.splitlines(),
        "constraints.txt",
        "resolved now",
        lineterm="",
        n=0,
    )
    sys.stderr.write("\n".join([*diff][:60]) + "\n")
    sys.stderr.write("constraints.txt has drifted. Regenerate it: python3 dev.py constraints\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
