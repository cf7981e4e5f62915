"""What the user has said already, in all the spellings that vLLM takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_dsv4.errors import OptionError
from vllm_dsv4.passthrough import Passthrough


@pytest.mark.parametrize(
    "words",
    [
        ["--tensor-parallel-size", "4"],
        ["--tensor-parallel-size=4"],
        ["--tensor_parallel_size", "4"],
        ["--tensor_parallel_size=4"],
        ["-tp", "4"],
        ["-tp=4"],
        ["--port", "1", "-tp", "2", "--tensor-parallel-size", "4"],
    ],
    ids=" ".join,
)
def test_one_option_in_many_spellings(words: list[str]) -> None:
    given = Passthrough(words)
    assert given.has("tensor-parallel-size")
    assert given.integer("tensor-parallel-size") == 4
    assert given.arguments == tuple(words)


def test_switches() -> None:
    assert Passthrough([]).switch("enable-expert-parallel") is None
    assert Passthrough(["-ep", "--port", "1"]).switch("enable-expert-parallel") is True
    off = Passthrough(["--enable-expert-parallel", "--no-enable-expert-parallel"])
    assert off.switch("enable-expert-parallel") is False
    assert off.has("enable-expert-parallel")


def test_words_where_numbers_may_be() -> None:
    given = Passthrough(["--max-model-len", "auto", "--gpu-memory-utilization", "much", "-n", "2"])
    assert given.integer("max-model-len") is None
    assert given.has("max-model-len")
    assert given.integer("nnodes") == 2
    with pytest.raises(OptionError, match="--gpu-memory-utilization is 'much'"):
        given.part("gpu-memory-utilization")


@pytest.mark.parametrize("value", ["²", "-1", "auto"])
def test_words_are_left_to_vllm(value: str) -> None:
    given = Passthrough([f"--tensor-parallel-size={value}"])
    assert given.integer("tensor-parallel-size") is None
    assert given.has("tensor-parallel-size")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("9" * 5000, "is no whole number"),
        ("1.5", "'1.5': only k, m, g and t, the powers of 1000, take a fraction; give a whole num"),
        ("1.5K", "give a whole number or 1.5k"),
        ("128kk", "'128kk' is no whole number; give one such as 131072, 128K or 131.072k"),
    ],
)
def test_odd_numbers_are_refused(value: str, message: str) -> None:
    with pytest.raises(OptionError, match=f"--max-model-len: .*{message}") as caught:
        Passthrough(["--max-model-len", value]).integer("max-model-len")
    assert len(str(caught.value)) < 400


def test_numbers_that_cannot_be() -> None:
    with pytest.raises(OptionError, match="--tensor-parallel-size is 0; at least 1 is needed"):
        Passthrough(["-tp", "0"]).integer("tensor-parallel-size")
    for value in ("nan", "inf", "0", "-1", "1.01"):
        given = Passthrough([f"--gpu-memory-utilization={value}"])
        with pytest.raises(OptionError, match=f"is {value}; more than 0 and at most 1"):
            given.part("gpu-memory-utilization")


def test_json_and_dotted_names() -> None:
    words = ["--kernel-config", '{"a": 1}', "--kernel_config.moe_backend", "marlin"]
    given = Passthrough(words)
    assert given.mapping("kernel-config") == {"a": 1, "moe_backend": "marlin"}
    assert given.has("kernel-config")
    assert Passthrough(["--kernel-config.moe_backend=triton"]).mapping("kernel-config") == {
        "moe_backend": "triton"
    }
    deep = Passthrough(["--a.b.c", "true", "--a.b.d=word", "--a.e", "2"])
    assert deep.mapping("a") == {"b": {"c": True, "d": "word"}, "e": 2}
    with pytest.raises(OptionError, match=r"--a\.b\.c: 'b' has a value already, 1"):
        Passthrough(["--a.b", "1", "--a.b.c", "2"]).mapping("a")
    for text, message in (("{", "is no JSON"), ("[1]", "a JSON object is needed")):
        with pytest.raises(OptionError, match=message):
            Passthrough(["--kernel-config", text]).mapping("kernel-config")


def test_an_option_is_left_out() -> None:
    given = Passthrough(["--a", "1", "--additional_config", "{}", "--b", "--additional-config={}"])
    assert given.without("additional-config") == ("--a", "1", "--b")


def test_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("tensor_parallel_size: 2\nkernel-config: {moe_backend: marlin}\nport: 1\n")
    given = Passthrough(["--config", str(file), "--port", "9"])
    assert given.integer("tensor-parallel-size") == 2
    assert given.mapping("kernel-config") == {"moe_backend": "marlin"}
    assert given.integer("port") == 9  # the command line ranks above
    with pytest.raises(OptionError, match="nothing.yaml"):
        Passthrough(["--config", str(tmp_path / "nothing.yaml")])
    file.write_text("- 1\n")
    with pytest.raises(OptionError, match="no mapping"):
        Passthrough(["--config", str(file)])
