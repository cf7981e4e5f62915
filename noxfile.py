"""The development sessions. `python3 dev.py SESSION...` runs them; `python3 dev.py` lists them.

Each session has its own environment, installed by uv at the versions and hashes of
constraints.txt. Only what a session needs is installed.
"""

import os
from pathlib import Path

import nox

# Many processes here import torch: without bytecode on disk each would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["tests"]

ROOT = Path(__file__).resolve().parent
CODEC = "./packages/nvfp4-codec"
PATCHES = "./packages/modelopt-v4-patches"
# Installed without their requirements: the test group has those that tests need.
OTHERS = ("modelopt-v4-patches", "vllm-dsv4", "megamoe-kernel")
OTHERS_EDITABLE = tuple(f"--editable=./packages/{name}" for name in OTHERS)


def install(session: nox.Session, *arguments: str) -> None:
    """Install with every version and hash, build requirements included, from constraints.txt."""
    session.install(
        "--constraints=constraints.txt", "--build-constraints=constraints.txt", *arguments
    )


def install_workspace(session: nox.Session, *arguments: str) -> None:
    """Install the codec, its native extension built from source, and the other members."""
    install(session, CODEC, *arguments)
    install(session, "--no-deps", *OTHERS_EDITABLE)


def run_pytest(session: nox.Session, *arguments: str) -> None:
    # One thread for each worker: two workers share two cores. Each begins with half of the tests,
    # so that what a package's tests import or build is mostly made by one of them.
    session.run(
        *("pytest", "--numprocesses=2", "--dist=worksteal", *arguments, *session.posargs),
        env={"OMP_NUM_THREADS": "1"},
        silent=False,
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting, one version, and constraints.txt in step with the pyproject files."""
    install(session, "--group=lint")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("hadolint", "deploy/Dockerfile")
    session.run("shellcheck", "deploy/build.sh")
    session.run("python", "tools/version.py", "--check")
    session.run("python", "tools/check_links.py")
    session.run("python", "tools/constraints.py", "--check")


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy, strict, over all packages and tools."""
    requirements = f"--requirements={CODEC}/pyproject.toml"  # without compiling the codec
    install(session, requirements, "--group=typecheck")
    session.run("mypy", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests that need no GPU (the default)."""
    install_workspace(session, "--group=test")
    run_pytest(session)


@nox.session(name="tests-full")
def tests_full(session: nox.Session) -> None:
    """The same tests with more random examples, plus the long fuzz and mutation runs."""
    install_workspace(session, "--group=test")
    run_pytest(session, "--full")


@nox.session
def integration(session: nox.Session) -> None:
    """The tests that need a GPU. The command inside also works where only pytest is installed."""
    install_workspace(session, "--group=test")
    session.run("pytest", "-m", "gpu", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The CPU benchmarks: a table from cpu.py, JSON from the others.

    `bench -- NAME ARGUMENTS...` runs one of any package's: `bench -- cpu --json cpu.json`, and on a
    machine with a GPU `bench -- gpu --out gpu.json`, on Hopper
    `bench -- hopper --peers --out docs/hopper.json`, which draws docs/hopper.svg too.
    """
    install_workspace(session, "--group=test")
    name, *arguments = session.posargs or [""]
    for benchmark in [name] if name else ["cpu", "convert", "dequant", "export", "validate"]:
        (path,) = ROOT.glob(f"packages/*/benchmarks/{benchmark}.py")
        session.run("python", str(path.relative_to(ROOT)), *arguments)


@nox.session
def build(session: nox.Session) -> None:
    """sdist and wheels of every package into dist/, each installed and used in a clean place."""
    install(session, "--group=build")
    session.run("python", "tools/build_packages.py")
    session.run("python", "tools/check_packages.py")


@nox.session
def docs(session: nox.Session) -> None:
    """The static site, with the API reference from docstrings, into site/; broken links fail."""
    install(session, "--group=docs")
    session.run("python", "tools/check_links.py")
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """The main job: a small DeepSeek-V4 through the whole pipeline, and what each way costs."""
    install(session, CODEC, f"{PATCHES}[modelopt]")
    session.run("dsv4-quantize", "demo", *session.posargs)


@nox.session
def example(session: nox.Session) -> None:
    """The codec alone, on another model: all-MiniLM-L6-v2 to NVFP4, verified and measured."""
    install(session, CODEC, "--group=example")
    session.run("python", "packages/nvfp4-codec/examples/minilm.py", *session.posargs)


@nox.session
def constraints(session: nox.Session) -> None:
    """Regenerate constraints.txt after a pyproject.toml changed."""
    session.run("python", "tools/constraints.py")


@nox.session(venv_backend="none")
def develop(session: nox.Session) -> None:
    """Make .venv for daily work: all packages editable, all linters and test peers, pre-commit."""
    if not (ROOT / ".venv").exists():
        session.run("uv", "venv", ".venv")
    pip = (
        *("uv", "pip", "install", "--python=.venv/bin/python"),
        *("--constraints=constraints.txt", "--build-constraints=constraints.txt"),
    )
    groups = [f"--group={name}" for name in ("test", "lint", "typecheck", "hooks")]
    session.run(*pip, f"--editable={CODEC}", *groups)
    session.run(*pip, "--no-deps", *OTHERS_EDITABLE)
