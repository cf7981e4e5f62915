"""Set everything up and run a development session: `python3 dev.py tests`.

Needs Python 3.11 to 3.13 with venv and pip, nothing else. The first run makes a private
environment in .dev/ with uv and nox, at the versions and hashes of constraints.txt; every run then
hands over to nox, whose sessions are in noxfile.py. `python3 dev.py` alone lists them. Arguments
after `--` go to the session: `python3 dev.py tests -- -k e2m1`.
"""

import sys

OLDEST, NEWEST = (3, 11), (3, 13)

# Before anything that an older Python could not run.
if not OLDEST <= sys.version_info[:2] <= NEWEST or not sys.platform.startswith("linux"):
    sys.exit(
        "dev.py needs Linux and Python {}.{} to {}.{}; this is Python {}.{} on {}.\n"
        "Run it with a suitable one, for example: python3.12 dev.py tests".format(
            *OLDEST, *NEWEST, *sys.version_info[:2], sys.platform
        )
    )

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints.txt"
HOME = ROOT / ".dev"
STAMP = HOME / "complete"


def pinned(package: str) -> str:
    """Return the package's entry in constraints.txt: its pin, then one line for each hash."""
    pattern = rf"^{re.escape(package)}==.*\n(?:[ \t]+--hash=.*\n)*"
    entry = re.search(pattern, CONSTRAINTS.read_text(), re.MULTILINE)
    if entry is None:
        raise SystemExit(f"constraints.txt has no entry for {package}: restore it from git")
    return entry.group()


def fingerprint() -> str:
    """Return what the private environment depends on, in one line."""
    what = (sys.version, sys.executable, str(ROOT), pinned("uv"), pinned("nox"))
    return hashlib.sha256("\0".join(what).encode()).hexdigest()


def run(command: list[str], remedy: str) -> None:
    """Run a step of the set-up; on failure stop with its output and what to do about it."""
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode != 0:
        raise SystemExit(f"{result.stdout}\n{' '.join(command)} failed.\n{remedy}")


def bootstrap() -> None:
    """Make .dev/ afresh: a virtual environment with uv (by pip) and nox (by uv)."""
    print("dev.py: setting up .dev/ (once)", file=sys.stderr, flush=True)
    shutil.rmtree(HOME, ignore_errors=True)
    run(
        [sys.executable, "-m", "venv", str(HOME)],
        "Python's venv module is missing or incomplete. On Debian and Ubuntu: apt install"
        f" python{sys.version_info[0]}.{sys.version_info[1]}-venv",
    )
    python = str(HOME / "bin" / "python")
    requirement = HOME / "uv.txt"
    requirement.write_text(pinned("uv"))
    network = (
        "Is the package index reachable? pip's own settings (proxy, index, certificate) apply."
    )
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, "--require-hashes", "--requirement", str(requirement)], network)
    nox = pinned("nox").split()[0]
    uv = [str(HOME / "bin" / "uv"), "pip", "install", "--quiet", "--python", python]
    run(
        [*uv, "--constraints", str(CONSTRAINTS), "--require-hashes", nox],
        network.replace("pip's own settings", "uv's own settings"),
    )
    STAMP.write_text(fingerprint())


def nox_arguments(arguments: list[str]) -> list[str]:
    """Turn `tests docs -- -k x` into nox's arguments; with no session, list them."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    sessions, rest = arguments[:split], arguments[split:]
    if not sessions:
        return ["--list"]
    if sessions[0].startswith("-"):
        return arguments
    return ["--sessions", *sessions, *rest]


def main() -> None:
    if not STAMP.exists() or STAMP.read_text() != fingerprint():
        bootstrap()
    binaries = HOME / "bin"
    os.chdir(ROOT)
    os.environ["PATH"] = os.pathsep.join([str(binaries), os.environ.get("PATH", os.defpath)])
    nox = str(binaries / "nox")
    os.execv(nox, [nox, *nox_arguments(sys.argv[1:])])


if __name__ == "__main__":
    main()
