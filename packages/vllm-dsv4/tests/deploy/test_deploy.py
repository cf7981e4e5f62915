"""deploy/, checked without Docker: the Dockerfile, compose.yaml and build.sh."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_dsv4.compat import version_problem
from vllm_dsv4.gpus import parse_gpus
from vllm_dsv4.serve import serve_command

ROOT = Path(__file__).parents[4]
DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN",
    "SHELL", "USER", "WORKDIR",
}  # fmt: skip
#: Of the Compose specification: what a service may have here.
SERVICE = {
    "build", "cap_drop", "command", "deploy", "environment", "healthcheck", "image", "ipc", "ports",
    "restart", "security_opt", "ulimits", "volumes",
}  # fmt: skip
SECRET = re.compile(r"(?i)(passw|secret|token|credential|api_?key)")


def instructions() -> list[tuple[str, str]]:
    """Name and rest of each instruction, continued lines joined, comments left out."""
    lines = [
        line
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines()]


def of(name: str) -> list[str]:
    return [rest for own, rest in instructions() if own == name]


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    return program


def test_hadolint() -> None:
    done = subprocess.run([tool("hadolint"), DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_shellcheck() -> None:
    done = subprocess.run([tool("shellcheck"), DEPLOY / "build.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_instructions_are_known_and_images_pinned() -> None:
    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    given = dict(argument.split("=", 1) for argument in of("ARG") if "=" in argument)
    stages: set[str] = set()
    for image in of("FROM"):
        name, _, stage = image.partition(" AS ")
        variable = re.fullmatch(r"\$\{(\w+)\}", name)
        assert variable, f"{name} is not a variable"
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", given[variable[1]])
        stages.add(stage)
    assert stages == {"uv", "wheels", ""}
    _, _, tag = given["VLLM_IMAGE"].partition(":v")
    assert given["VLLM_IMAGE"] == f"vllm/vllm-openai:v{tag}"
    assert version_problem(tag) is None
    pinned = re.search(r'"uv==([^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert given["UV_IMAGE"].endswith(f":{pinned[1]}")


def test_the_final_image_is_not_root_and_has_a_health_check() -> None:
    assert int(of("USER")[-1]) > 0
    names = [name for name, _ in instructions()]
    assert names[-1] == "ENTRYPOINT"
    assert names.count("HEALTHCHECK") == 1
    options, _, words = of("HEALTHCHECK")[0].partition(" CMD ")
    found = dict(re.findall(r"--([a-z-]+)=(\S+)", options))
    check = compose()["services"]["vllm"]["healthcheck"]
    assert check.pop("test") == ["CMD", *json.loads(words)]
    assert {key.replace("_", "-"): str(value) for key, value in check.items()} == found
    compile(json.loads(words)[2], "health check", "exec")


def test_nothing_secret_is_written() -> None:
    for name in ("ARG", "ENV", "LABEL", "COPY"):
        assert not [rest for rest in of(name) if SECRET.search(rest)]
    # From the caller's environment: a name without a value.
    environment = compose()["services"]["vllm"]["environment"]
    assert environment == ["VLLM_API_KEY"]
    text = (DEPLOY / "compose.yaml").read_text() + (DEPLOY / "build.sh").read_text()
    assert [m[0] for m in re.finditer(r"\w*(?:KEY|TOKEN|SECRET)\w*\s*[=:]\s*\S", text)] == []


def test_run_instructions_are_shell(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    for rest in of("RUN"):
        script.write_text(re.sub(r"--mount=\S+\s+", "", rest))
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def ignored(path: str) -> bool:
    """By the last rule that matches the path or a folder above it."""
    result = False
    parents = ["/".join(path.split("/")[: n + 1]) for n in range(path.count("/") + 1)]
    for rule in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines():
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!")
        forms = {pattern, pattern.removeprefix("**/")}
        matched = any(
            fnmatch.fnmatchcase(parent if "/" in form else parent.rsplit("/", 1)[-1], form)
            and parent.count("/") == (parent if "**" in pattern else form).count("/")
            for parent in parents
            for form in forms
        )
        if matched:
            result = not rule.startswith("!")
    return result


def test_what_is_copied_exists_and_reaches_the_build() -> None:
    sources = [rest.split() for rest in of("COPY") if "--from=" not in rest]
    copied = [source for words in sources for source in words[:-1]]
    assert {"constraints.txt", "packages/nvfp4-codec", "packages/vllm-dsv4"} == set(copied)
    for source in copied:
        assert (ROOT / source).exists()
        assert not ignored(source)
    assert not ignored("packages/nvfp4-codec/csrc/module.cpp")
    assert not ignored("packages/vllm-dsv4/src/vllm_dsv4/serve.py")
    for path in ("README.md", ".git/config", "packages/megamoe-kernel/pyproject.toml", "dist/x.whl",
                 "packages/vllm-dsv4/tests/checkpoints.py",
                 "packages/nvfp4-codec/src/nvfp4_codec/_native.so"):  # fmt: skip
        assert ignored(path), path


def test_compose_is_of_the_specification() -> None:
    document = compose()
    assert set(document) == {"services", "volumes"}
    assert set(document["services"]) == {"vllm"}
    service = document["services"]["vllm"]
    assert set(service) <= SERVICE
    assert service["build"] == {"context": "..", "dockerfile": "deploy/Dockerfile"}
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    model, cache = service["volumes"]
    assert model["read_only"] is True
    assert model["target"] == json.loads(of("ENTRYPOINT")[0])[2]
    volume, home = cache.split(":")
    assert volume in document["volumes"]
    assert of("ENV") == [f"HOME={home}"]
    assert service["cap_drop"] == ["ALL"]


def interpolated(environment: dict[str, str]) -> dict[str, Any]:
    """As docker compose replaces ``${NAME:-default}`` and ``${NAME:?message}``."""

    def replace(found: re.Match[str]) -> str:
        value = environment.get(found[1], "")
        if not value and found[2] == "?":
            raise LookupError(found[3])
        return value or found[3]

    text = (DEPLOY / "compose.yaml").read_text()
    text = re.sub(r"\$\{(\w+):([-?])([^}]*)\}", replace, text)
    assert "$" not in text
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def test_paths_and_ports_are_variables() -> None:
    usual = interpolated({"MODEL_PATH": "/data/model"})["services"]["vllm"]
    assert usual["ports"] == ["127.0.0.1:8000:8000"]
    assert usual["volumes"][0]["source"] == "/data/model"
    other = interpolated(
        {"MODEL_PATH": "/m", "PORT": "9", "BIND": "0.0.0.0", "SERVED_NAME": "x", "IMAGE": "y:1"}
    )["services"]["vllm"]
    assert other["ports"] == ["0.0.0.0:9:8000"]
    assert other["image"] == "y:1"
    assert other["command"] == ["--served-model-name", "x"]
    with pytest.raises(LookupError, match="set MODEL_PATH"):
        interpolated({})


def test_the_containers_words_are_a_vllm_serve_line(checkpoint: Callable[..., Path]) -> None:
    program, command, _, *words = json.loads(of("ENTRYPOINT")[0])
    assert (program, command) == ("vllm-dsv4", "serve")
    words += interpolated({"MODEL_PATH": "/m"})["services"]["vllm"]["command"]
    found = serve_command(checkpoint("full"), parse_gpus("B200:1"), {}, words)
    assert list(found.argv[-len(words) :]) == words
    assert words[words.index("--port") + 1] == of("EXPOSE")[0]


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., tuple[int, str, list[str]]]:
    """Runs build.sh with a docker that writes down its arguments."""
    log = tmp_path / "log"
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    docker.chmod(0o755)

    def run(*words: str, **environment: str) -> tuple[int, str, list[str]]:
        log.write_text("")
        path = f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"
        done = subprocess.run(
            ["bash", DEPLOY / "build.sh", *words],
            capture_output=True, text=True, env={"PATH": path, **environment}, cwd=tmp_path,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()

    return run


def test_build_and_push(build: Callable[..., tuple[int, str, list[str]]]) -> None:
    version = (ROOT / "VERSION").read_text().strip()
    code, out, calls = build()
    assert (code, out) == (0, "vllm-dsv4:vllm-0.33.0\n")
    assert calls == [
        "build --file deploy/Dockerfile --tag vllm-dsv4:vllm-0.33.0 "
        f"--build-arg VERSION={version} ."
    ]
    code, out, calls = build("--push", REGISTRY="reg.example/a/", VLLM_IMAGE="m/v:1")
    assert code == 0
    assert "--build-arg VLLM_IMAGE=m/v:1" in calls[0]
    assert calls[1] == "push reg.example/a/vllm-dsv4:vllm-0.33.0"
    image = compose()["services"]["vllm"]["image"]
    assert image == "${IMAGE:-vllm-dsv4:vllm-0.33.0}"


def test_build_refuses_what_it_does_not_know(
    build: Callable[..., tuple[int, str, list[str]]],
) -> None:
    code, out, calls = build("--help")
    assert (code, calls) == (2, [])
    assert "usage" in out
    code, out, calls = build("--push")
    assert (code, calls) == (2, [])
    assert "set REGISTRY" in out
    assert os.access(DEPLOY / "build.sh", os.X_OK)
