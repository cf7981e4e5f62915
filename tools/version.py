"""Write the version in VERSION into every package, and into the `==` pins between them.

`python tools/version.py` writes; `--check` only compares and fails when something differs.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("nvfp4-codec", "modelopt-v4-patches", "vllm-dsv4", "megamoe-kernel")

_VERSION_LINE = re.compile(r'^version = "[^"]*"$', re.MULTILINE)
_PIN = re.compile(rf'"({"|".join(PACKAGES)})==[^"]*"')


def read_version() -> str:
    """Return the one version of all packages."""
    return (ROOT / "VERSION").read_text().strip()


def manifest(package: str) -> Path:
    """Return the path of a package's pyproject.toml."""
    return ROOT / "packages" / package / "pyproject.toml"


def stamped(text: str, version: str) -> str:
    """Return a pyproject's text with its version line and its pins set to `version`.

    Raises ValueError when the text does not have exactly one version line.
    """
    text, lines = _VERSION_LINE.subn(f'version = "{version}"', text)
    if lines != 1:
        raise ValueError(f'found {lines} lines of the form version = "...", expected exactly one')
    return _PIN.sub(rf'"\g<1>=={version}"', text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    check: bool = parser.parse_args().check

    version = read_version()
    differing = []
    for package in PACKAGES:
        path = manifest(package)
        found = path.read_text()
        expected = stamped(found, version)
        if expected != found:
            differing.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(expected)
    if check and differing:
        print(f"not at version {version}: {', '.join(differing)}. Run python3 tools/version.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
