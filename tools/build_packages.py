"""Build the sdist and the wheels of every package into dist/.

The pure packages get one wheel. Those with an extension, the codec and megamoe-kernel, get one for
each supported Python that this machine has, built from the sdist and repaired by auditwheel; a
Python that is missing is named.
"""

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from interpreters import find_interpreters
from version import PACKAGES, ROOT, read_version

DIST = ROOT / "dist"
NATIVE = ("nvfp4-codec", "megamoe-kernel")


def distribution_name(package: str) -> str:
    """Return the package's name as it is spelled in file names."""
    return package.replace("-", "_")


def sdist_of(package: str) -> Path:
    """Return where the package's sdist is, or will be."""
    return DIST / f"{distribution_name(package)}-{read_version()}.tar.gz"


def run(*command: str | Path) -> None:
    """Run a command; when it fails, stop with its output."""
    words = [str(word) for word in command]
    result = subprocess.run(
        words, cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode != 0:
        raise SystemExit(f"{result.stdout}\n{' '.join(words)} failed")


def build(source: Path, destination: Path, *options: str | Path) -> None:
    constraints = "--build-constraints=constraints.txt"
    run(
        "uv",
        "build",
        source,
        "--out-dir",
        destination,
        constraints,
        "--no-create-gitignore",
        *options,
    )


def build_native_wheel(sdist: Path, python: Path) -> Path:
    """Build one wheel from the sdist, repair it, and return its path in dist/.

    Stops when the build fell back to pure Python, which is right for a user without a
    compiler and wrong for a release.
    """
    with tempfile.TemporaryDirectory() as scratch:
        raw, repaired = Path(scratch, "raw"), Path(scratch, "repaired")
        build(sdist, raw, "--wheel", "--python", python)
        (wheel,) = raw.glob("*.whl")
        if wheel.name.endswith("-none-any.whl"):
            raise SystemExit(
                f"{wheel.name} has no native extension: its build failed. To see why: "
                f"uv build --wheel --python {python} {sdist}"
            )
        run("auditwheel", "repair", wheel, "--wheel-dir", repaired)
        (result,) = repaired.glob("*.whl")
        return Path(shutil.move(result, DIST / result.name))


def main() -> int:
    shutil.rmtree(DIST, ignore_errors=True)
    for package in PACKAGES:
        source = ROOT / "packages" / package
        if package in NATIVE:
            build(source, DIST, "--sdist")
        else:
            build(source, DIST)
    jobs = []
    for version, python in find_interpreters().items():
        name = "Python {}.{}".format(*version)
        if python is None:
            print(f"{name}: MISSING on this machine, no wheels of {', '.join(NATIVE)} for it")
            continue
        jobs += [(sdist_of(package), python) for package in NATIVE]
    # Two at a time: most of a build is one large file, or no compiler at all.
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build_native_wheel, *zip(*jobs, strict=True)))
    print(*sorted(path.name for path in DIST.iterdir()), sep="\n")
    return 0 if jobs else 1


if __name__ == "__main__":
    sys.exit(main())
