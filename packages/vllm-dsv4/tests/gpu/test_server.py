"""`vllm-dsv4 serve` answers an OpenAI client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .fleet import ENVIRONMENT, PATIENCE, Fleet, end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.hopper,
    pytest.mark.filterwarnings("ignore"),  # transformers', as it finds its peers
]

ARGUMENTS = (
    "--host=127.0.0.1", "--served-model-name=tiny", "--enforce-eager", "--max-model-len=4096",
    "--max-num-seqs=4", "--no-enable-prefix-caching", "--gpu-memory-utilization=0.1",
    "--tensor-parallel-size=1", f"--kv-cache-memory-bytes={2 << 30}",
    '--kernel-config={"enable_jit_warmup": false}',
)  # fmt: skip


@pytest.fixture(scope="module")
def url(
    fleet: Fleet, place: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server that starts beside the fleet's engines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "server.log"
    program = str(Path(sys.executable).with_name("vllm-dsv4"))
    command = [program, "serve", str(place("full")), *ARGUMENTS]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, f"--port={port}"], env={**os.environ, **ENVIRONMENT}, stdout=output,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            base = f"http://127.0.0.1:{port}"
            _wait(server, f"{base}/health", log)
            yield base
        finally:
            end(server)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert server.poll() is None, f"ended with {server.poll()}:\n{log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"not ready after {PATIENCE} s:\n{log.read_text()[-4000:]}")


def ask(url: str, document: Any = None) -> Any:
    """The answer to a GET, or to a POST of a JSON document."""
    data = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_it_lists_the_model(url: str) -> None:
    assert [model["id"] for model in ask(f"{url}/v1/models")["data"]] == ["tiny"]


def test_it_completes_python(url: str) -> None:
    """The model has learnt that a method's first parameter is self."""
    answer = ask(
        f"{url}/v1/completions",
        {"model": "tiny", "prompt": "class A:\n    def __init__(s", "max_tokens": 3,
         "temperature": 0},
    )  # fmt: skip
    assert answer["choices"][0]["text"] == "elf"
    assert answer["usage"]["completion_tokens"] == 3


def test_it_chats(url: str) -> None:
    """In DeepSeek-V4's own format: vLLM has it built in, the checkpoint needs no template."""
    answer = ask(
        f"{url}/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "import os"}],
         "max_tokens": 8, "temperature": 0, "chat_template_kwargs": {"thinking": False}},
    )  # fmt: skip
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 8
    assert choice["finish_reason"] == "length"
