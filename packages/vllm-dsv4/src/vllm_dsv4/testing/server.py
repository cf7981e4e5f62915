"""A warm vLLM process that runs functions in forks of itself: importing vLLM takes half a minute.

The process runs on the stand-in platform and has loaded no plugin yet; each function starts from
that state and leaves nothing behind. `Harness` is the client's side and needs no vLLM.
"""

from __future__ import annotations

import importlib
import io
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import torch

from .platform import environment

#: What building a model imports, as far as it is installed.
WARM: Final = (
    "flashinfer",
    "humming.ops",
    "ray",
    "vllm.engine.arg_utils",
    "vllm.model_executor.layers.quantization.modelopt",
    "vllm.model_executor.model_loader",
    "vllm.models.deepseek_v41",
    "vllm.models.deepseek_v4.nvidia.mtp",
)


class RemoteError(Exception):
    """What a function raised in the vLLM process; ``kind`` is the exception's class name."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message


class Harness:
    """Runs functions in a vLLM process on this machine, GPU or not. A context manager.

    folder: scratch, for the stand-ins and vLLM's caches; kept. Raises StandInError as
    `environment` does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        variables = {**os.environ, **environment(folder), "OMP_NUM_THREADS": "1"}
        self._log = (folder / "log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def warm(self) -> None:
        """Imports vLLM's models, so that functions called from now on start at once."""
        self._ask(None, "", {})

    def call(self, where: str | Path, function: str, **keywords: Any) -> Any:
        """The result of a function of a module, or of a file, in a fork of the vLLM process.

        Its arguments and its result are pickled. Raises RemoteError for what it raises.
        """
        return self._ask(str(where), function, keywords)

    def log(self) -> str:
        """What the process and its forks have written so far."""
        self._log.flush()
        return (self._folder / "log").read_text(errors="replace")

    def _ask(self, where: str | None, function: str, keywords: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, _packed((where, function, dict(keywords))))
        try:
            succeeded, value = _unpacked(_receive(self._process.stdout))
        except EOFError:
            raise RemoteError(
                "EOFError", "the vLLM process has ended", self.log()[-3000:]
            ) from None
        if not succeeded:
            raise RemoteError(*value)
        return value

    def __enter__(self) -> Harness:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()
        self._log.close()


def serve() -> None:
    """Answers requests from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # vLLM's prints are not answers
    while True:
        try:
            where, function, keywords = _unpacked(_receive(sys.stdin.buffer))
        except EOFError:
            return
        if where is None:
            for module in WARM:
                with suppress(ModuleNotFoundError):
                    importlib.import_module(module)
            answer = _packed((True, None))
        else:
            answer = _in_fork(where, function, keywords)
        try:
            _send(answers, answer)
        except BrokenPipeError:  # whoever asked has left
            return


def _in_fork(where: str, function: str, keywords: dict[str, Any]) -> bytes:
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            try:
                file.write(_run(where, function, keywords))
                file.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        file.seek(0)
        answer = file.read()
    if not answer:
        return _packed((False, ("SystemExit", "the function ended its process", "")))
    return answer


def _run(where: str, function: str, keywords: dict[str, Any]) -> bytes:
    try:
        if where.endswith(".py"):
            found = runpy.run_path(where)[function]
        else:
            found = getattr(importlib.import_module(where), function)
        return _packed((True, found(**keywords)))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        return _packed((False, (type(error).__name__, str(error), trace)))


def _packed(content: object) -> bytes:
    """Pickled as torch does it: pickle alone loses the dtype of FP8 tensors."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _unpacked(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def _send(stream: IO[bytes], content: bytes) -> None:
    stream.write(len(content).to_bytes(8, "little"))
    stream.write(content)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    length = int.from_bytes(_exactly(stream, 8), "little")
    return _exactly(stream, length)


def _exactly(stream: IO[bytes], length: int) -> bytes:
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return content


if __name__ == "__main__":
    serve()
    os._exit(0)  # taking down all of vLLM's modules takes seconds
