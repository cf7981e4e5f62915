"""What the files of the repository promise each other."""

import ast
import re
import runpy
import subprocess
from pathlib import Path

import pytest

import nvfp4_codec

ROOT = Path(__file__).resolve().parent.parent


def tracked_files() -> list[Path]:
    """Return the files that git tracks or would track; skip where this is no git checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: lists the files that git tracks")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def commands(text: str) -> set[str]:
    """Return each `python3 dev.py ...` command of a text, without its comment."""
    found = re.findall(r"^(?:\$ )?(python3 dev\.py [a-z -]+?)(?:\s*(?:#|\|\|).*)?$", text, re.M)
    return {command.strip() for command in found}


def test_the_readme_and_ci_run_the_same_tests_the_same_way() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    readme = commands((ROOT / "README.md").read_text())
    assert readme == {"python3 dev.py demo", "python3 dev.py tests"}
    assert "python3 dev.py tests" in commands(ci)
    assert "demo" in {session for command in commands(ci) for session in command.split()[2:]}


def test_every_session_is_described_in_contributing() -> None:
    sessions = re.findall(
        r'^@nox\.session(?:\((?:name="([a-z-]+)")?[^)\n]*\))?\ndef (\w+)',
        (ROOT / "noxfile.py").read_text(),
        re.M,
    )
    described = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert sorted(described) == sorted(name or function for name, function in sessions)


@pytest.mark.parametrize("package", sorted(path.name for path in ROOT.glob("packages/*/")))
def test_every_package_has_what_its_readers_need(package: str) -> None:
    folder = ROOT / "packages" / package
    module = package.replace("-", "_")
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / "src" / module / "py.typed").exists()
    assert (folder / "README.md").read_text().startswith(f"# {package}\n")


def test_constraints_are_exact_hashed_and_name_no_index() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line and line[0] not in "# "]
    assert len(entries) > 200
    assert not [line for line in entries if not re.match(r"[a-z0-9.-]+==[^ ]+ .*\\$", line)]
    assert sum("--hash=sha256:" in line for line in lines) >= len(entries)
    assert not [line for line in lines if "://" in line or "--index" in line or " @ " in line]


def test_gpu_tests_are_in_folders_named_gpu() -> None:
    """`pytest -m gpu` looks nowhere else, so a GPU test outside would never run."""
    tests = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")]
    hardware = {f"pytest.mark.{marker}" for marker in ("gpu", "hopper", "blackwell", "multi_gpu")}
    outside = [
        path.relative_to(ROOT)
        for path in tests
        if path.parent.name != "gpu"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in hardware
    ]
    assert not outside


def test_every_public_name_of_the_codec_is_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    documented = re.findall(r"^::: nvfp4_codec\.(\w+)$", pages, re.M)
    modules = {"checkpoint", "formats", "scales"}
    assert sorted(set(documented) - modules) == sorted(nvfp4_codec.__all__)
    assert len(documented) == len(set(documented))
    schemas = re.findall(r"^::: nvfp4_codec\.schemas\.(\w+)$", pages, re.M)
    packages = ROOT.glob("packages/nvfp4-codec/src/nvfp4_codec/schemas/*/__init__.py")
    assert sorted(schemas) == sorted(path.parent.name for path in packages)


# Written in pieces, so that this file does not find itself.
MACHINE = re.compile(
    "|".join(
        [
            r"(?<![\w.])/(?:home|Users)/\w+",
            "/" + "root/",
            "/" + "work/",
            # The loopback address is every machine's.
            r"\b(?!127\.0\.0\.1\b)(?:10|127|192\.168|172\.16)(?:\.\d{1,3}){2,3}\b(?![.\w-])",
            r"BEGIN [A-Z ]*PRIVATE " + "KEY",
        ]
    )
)


def test_no_tracked_file_names_a_machine() -> None:
    found = []
    for path in tracked_files():
        if path.name == "constraints.txt":
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}: {match.group()}"
            for match in MACHINE.finditer(text)
            if path != Path(__file__).resolve()
        ]
    assert not found


def test_broken_links_are_found(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "check_links.py"))
    broken_links = tool["broken_links"]
    broken_links.__globals__["ROOT"] = tmp_path
    page = tmp_path / "page.md"
    (tmp_path / "there.md").write_text("# One heading\n")
    page.write_text(
        "[a](there.md) [b](there.md#one-heading) [c](https://example.org/x)\n"
        "[d](gone.md) [e](there.md#none) [f](../outside.md)\n"
        "`[g](code.md)`\n\n```md\n[h](fenced.md)\n```\n"
    )
    assert [problem.split()[0] for problem in broken_links(page)] == [
        "gone.md",
        "there.md#none",
        "../outside.md",
    ]
