"""The cache trusts nothing that others could have written, and survives what processes do."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe_kernel import CacheError
from megamoe_kernel.jit import cache as jit_cache
from megamoe_kernel.jit.cache import CubinCache, default_folder, key_of

PARTS = {"kernel": "k", "target": "sm_90a"}
CUBIN = b"\x7fELF and so on\n\n"


def _never() -> bytes:
    raise AssertionError("the entry was there")


def test_an_entry_is_made_once(cache: CubinCache) -> None:
    assert cache.get(PARTS, lambda: CUBIN) == (CUBIN, False)
    assert cache.get(PARTS, _never) == (CUBIN, True)
    assert CubinCache(cache.folder).get(PARTS, _never) == (CUBIN, True)
    assert cache.get({**PARTS, "target": "sm_100a"}, lambda: b"other") == (b"other", False)


def test_keys_tell_names_from_values() -> None:
    keys = [key_of(parts) for parts in ({"a": "b"}, {"ab": ""}, {"": "ab"}, {"a": "b", "c": ""})]
    assert len(set(keys)) == 4
    assert key_of({"a": "1", "b": "2"}) == key_of({"b": "2", "a": "1"})


def test_a_version_has_its_own_entries(cache: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get(PARTS, lambda: CUBIN)
    monkeypatch.setattr(jit_cache, "VERSION", jit_cache.VERSION + 1)
    assert cache.get(PARTS, lambda: b"new") == (b"new", False)


def test_nobody_else_can_read_or_write(cache: CubinCache) -> None:
    cache.get(PARTS, lambda: CUBIN)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in cache.folder.iterdir()}
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert len(modes) == 3  # the cubin, its description, the lock
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o755], ids=oct)
def test_a_folder_open_to_others_is_refused(cache: CubinCache, mode: int) -> None:
    cache.folder.chmod(mode)
    with pytest.raises(CacheError, match=rf"mode {mode:04o}.*chmod go= "):
        CubinCache(cache.folder)


def test_folders_on_the_way_are_closed_too(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        CubinCache(tmp_path / "a" / "b" / "cubins")
    finally:
        os.umask(before)
    for made in ("a", "a/b", "a/b/cubins"):
        assert stat.S_IMODE((tmp_path / made).stat().st_mode) == 0o700, made
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755  # was there: its owner's business


@pytest.mark.parametrize("what", ["folder", "entry"])
def test_what_belongs_to_another_user_is_refused(
    what: str, cache: CubinCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.get(PARTS, lambda: CUBIN)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(cache.folder).st_uid + 1)
    with pytest.raises(CacheError, match="belongs to user"):
        CubinCache(cache.folder) if what == "folder" else cache.get(PARTS, _never)


def test_links_are_not_followed(cache: CubinCache, tmp_path: Path) -> None:
    cache.get(PARTS, lambda: CUBIN)
    elsewhere = tmp_path / "elsewhere"
    path = cache.path(PARTS)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(CacheError, match="cannot read"):
        cache.get(PARTS, _never)
    link = tmp_path / "link"
    link.symlink_to(cache.folder)
    with pytest.raises(CacheError, match="is not a folder"):
        CubinCache(link)


def test_an_entry_open_to_others_is_refused(cache: CubinCache) -> None:
    cache.get(PARTS, lambda: CUBIN)
    cache.path(PARTS).chmod(0o666)
    with pytest.raises(CacheError, match="open to others"):
        cache.get(PARTS, _never)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "another entry's"])
def test_a_damaged_entry_is_made_again(
    damage: str, cache: CubinCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.get(PARTS, lambda: CUBIN)
    path, other = cache.path(PARTS), {**PARTS, "target": "sm_100a"}
    content = path.read_bytes()
    if damage == "flipped":
        content = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    elif damage == "another entry's":
        cache.get(other, lambda: b"other")
        content = cache.path(other).read_bytes()
    else:
        content = content[:-1] if damage == "cut" else b""
    path.write_bytes(content)
    assert cache.get(PARTS, lambda: CUBIN) == (CUBIN, False)
    assert "is damaged" in caplog.text
    assert cache.get(PARTS, _never) == (CUBIN, True)


def test_a_failed_compilation_leaves_nothing(cache: CubinCache) -> None:
    def fail() -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.get(PARTS, fail)
    assert [path.suffix for path in cache.folder.iterdir()] == [".lock"]
    assert cache.get(PARTS, lambda: CUBIN) == (CUBIN, False)


def test_a_failed_write_leaves_nothing(cache: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CacheError, match=rf"{cache.folder}.*No space left on device; make room.*_CACHE"
    ):
        cache.get(PARTS, lambda: CUBIN)
    assert [path.suffix for path in cache.folder.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot use .*MEGAMOE_KERNEL_CACHE"):
        CubinCache(tmp_path / "file" / "cubins")


@pytest.mark.parametrize("suffix", [".lock", ".cubin", ".json"])
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_in_an_entrys_place_is_named(
    suffix: str, kind: str, cache: CubinCache, tmp_path: Path
) -> None:
    path = cache.path(PARTS).with_suffix(suffix)
    if kind == "folder":
        path.mkdir(mode=0o700)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    if (kind, suffix) == ("link", ".json"):  # replaced, not followed
        assert cache.get(PARTS, lambda: CUBIN) == (CUBIN, False)
    else:
        with pytest.raises(CacheError, match=rf"{path}.*remove it"):
            cache.get(PARTS, lambda: CUBIN)
    assert not (tmp_path / "elsewhere").exists()
    assert not list(cache.folder.glob(".new-*"))


def test_a_fifo_is_refused_and_not_waited_for(cache: CubinCache) -> None:
    def hangs(*_: object) -> None:
        raise AssertionError("it waits for a writer")

    os.mkfifo(cache.path(PARTS), 0o600)
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(5)
    try:
        with pytest.raises(CacheError, match="is not a file; remove it"):
            cache.get(PARTS, _never)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written(
    code: int, cache: CubinCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.get(PARTS, lambda: CUBIN)
    real = os.open

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    assert cache.get(PARTS, _never) == (CUBIN, True)
    with pytest.raises(CacheError, match=r"cannot write .*\.lock: .*set MEGAMOE_KERNEL_CACHE to"):
        cache.get({"b": "2"}, _never)


@pytest.mark.parametrize("what", ["sticky", "foreign", "here"])
def test_nobody_is_told_to_close_a_shared_folder(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o1777 if what == "sticky" else 0o755)
    if what == "foreign":
        (tmp_path / "notes.txt").write_text("")
    folder = Path() if what == "here" else tmp_path
    with pytest.raises(CacheError, match="to a folder of yours that holds nothing else") as caught:
        CubinCache(folder)
    assert "chmod" not in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MEGAMOE_KERNEL_CACHE": "~/mm"}, "home/mm"),
        ({"MEGAMOE_KERNEL_CACHE": ""}, "home/.cache/megamoe-kernel"),
        ({"XDG_CACHE_HOME": "relative"}, "home/.cache/megamoe-kernel"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, "xdg/megamoe-kernel"),
    ],
    ids=str,
)
def test_where_the_cache_is(
    variables: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MEGAMOE_KERNEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert default_folder.__wrapped__() == tmp_path / expected


def test_nobodys_home_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("MEGAMOE_KERNEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(CacheError, match="home directory.*set MEGAMOE_KERNEL_CACHE"):
        default_folder.__wrapped__()


_COMPETE = """
import os, sys
from pathlib import Path
from megamoe_kernel.jit.cache import CubinCache

folder, log = map(Path, sys.argv[1:])
sys.stdin.readline()

def make():
    with open(log, "a") as file:
        file.write("x")
    return b"cubin" * 1_000_000

for number in range(20):
    cubin, _ = CubinCache(folder).get({"number": str(number)}, make)
    assert cubin == b"cubin" * 1_000_000
"""


def test_of_many_processes_one_compiles(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _COMPETE, str(tmp_path / "cubins"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(4)]
    for process in processes:  # all at once, when all are there
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "x" * 20
