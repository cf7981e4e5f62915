"""Fail on a link in a tracked Markdown file that points at nothing in this repository.

Links to the web are not followed: the check must give the same answer without a network.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
_WEB = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def prose(text: str) -> str:
    """Return Markdown without its code, where brackets are not links."""
    return _CODE.sub("", _FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Return the anchors that the headings of a Markdown text get."""
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        found.add(re.sub(r"\s+", "-", plain))
    return found


def broken_links(page: Path) -> Iterator[str]:
    """Yield each link of a Markdown file whose target file or heading does not exist."""
    for target in _LINK.findall(prose(page.read_text())):
        if _WEB.match(target):
            continue
        path, _, anchor = target.partition("#")
        destination = (page.parent / path).resolve() if path else page
        if not destination.is_relative_to(ROOT):
            yield f"{target} leaves the repository"
        elif not destination.exists():
            yield f"{target} does not exist"
        elif anchor and anchor not in anchors(destination.read_text()):
            yield f"{target} names no heading of {path or page.name}"


def markdown_files() -> list[Path]:
    """Return the Markdown files that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return [path for name in listing.split("\0") if name and (path := ROOT / name).exists()]


def main() -> int:
    pages = markdown_files()
    problems = [
        f"{page.relative_to(ROOT)}: {problem}" for page in pages for problem in broken_links(page)
    ]
    for problem in problems:
        print(problem)
    if not pages:
        print("no Markdown file found")
    return 1 if problems or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
