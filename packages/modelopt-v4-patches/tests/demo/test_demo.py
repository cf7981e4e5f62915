"""What the demo concludes from its measurements, and how it shows them."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from modelopt_v4_patches import demo
from modelopt_v4_patches.cli import demo as command
from modelopt_v4_patches.cli import main
from modelopt_v4_patches.demo import BF16, BROKEN, COVERAGE, FULL, MODELOPT, OFFICIAL, OURS
from modelopt_v4_patches.errors import DSV4Error
from modelopt_v4_patches.quality.evaluate import load_model
from modelopt_v4_patches.quality.fidelity import MTP, PARTS, Fidelity, compare_weights
from modelopt_v4_patches.quality.intervals import Difference

NOTHING = Difference(0.0, 0.0, 0.0)
EXACT = dict.fromkeys((*PARTS.values(), MTP, "others"), math.inf)


def weights(digest: str = "official", part: str = "others", sqnr: float = math.inf) -> Fidelity:
    gain = 0.967 if part == "experts" else 1.0
    return Fidelity({**EXACT, part: sqnr}, frozenset(), True, digest, gain)


def row(name: str, perplexity: float = 2.9, fidelity: Fidelity | None = None) -> demo.Row:
    quality = demo.Quality(perplexity, Difference(perplexity - 2.9, -0.01, 0.01), 0.07)
    return demo.Row(name, 10**7, fidelity or weights(), quality, quality, 0)


def sound() -> demo.Result:
    rows = [row(name) for name in (OFFICIAL, BF16)]
    rows += [row(name, 2.95, weights(name, "attn", 20.5)) for name in OURS]
    rows += [row(MODELOPT, 2.97, weights(MODELOPT, "experts", 23.4))]
    rows += [replace(row(name, 90.0), findings=None) for name in BROKEN]
    better = demo.Comparison(Difference(0.002, -0.003, 0.014), Difference(-0.01, -0.02, -0.001))
    against = {"weight-only": better, "activations": better}
    return demo.Result(tuple(rows), against, (), 0, 24570, {"dequant": 1.0})


def compared(mode: str, **worse: Difference) -> demo.Result:
    result = sound()
    against = {**result.against_modelopt, mode: replace(result.against_modelopt[mode], **worse)}
    return replace(result, against_modelopt=against)


def changed(name: str, **fields: Any) -> demo.Result:
    result = sound()
    rows = (replace(r, **fields) if r.name == name else r for r in result.rows)
    return replace(result, rows=tuple(rows))


def test_a_sound_result_has_no_faults() -> None:
    assert demo.faults(sound()) == []


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (changed(FULL, weights=weights(FULL, "experts", 60.0)), "full: experts differ .* by 0.001"),
        (changed("experts", weights=weights("experts", MTP, 40.0)), "experts: MTP blocks differ"),
        (changed(COVERAGE, findings=2), "full, modelopt's coverage: validate has 2 findings"),
        (replace(sound(), snapshot_findings=3), "the snapshot: validate has 3 findings"),
        (changed(BF16, weights=weights("other")), "BF16: its weights are not the official ones"),
        (
            changed(BROKEN[0], weight_only=demo.Quality(3.1, NOTHING, 0)),
            "broken: E8M0 read as E4M3: a perplexity below 8.7",
        ),
        (
            changed(BROKEN[1], weight_only=demo.Quality(math.nan, NOTHING, 0)),
            "broken: block scales of one",
        ),
        (
            compared("activations", perplexity=Difference(0.002, -0.01, 0.015)),
            "modelopt's coverage, activations: perplexity may be 0.5% above",
        ),
        (
            compared("weight-only", perplexity=Difference(0.002, 0.0001, 0.004)),
            "modelopt's coverage, weight-only: perplexity is worse than modelopt's own export's",
        ),
        (
            compared("weight-only", perplexity=Difference(math.nan, math.nan, 0.004)),
            "modelopt's coverage, weight-only: perplexity is worse",
        ),
        (
            compared("weight-only", shift=Difference(math.nan, math.nan, math.nan)),
            "modelopt's coverage, weight-only: not closer",
        ),
    ],
    ids=[
        *("experts", "mtp", "findings", "snapshot", "bf16", "unbroken", "nan"),
        *("much worse", "worse", "not a number", "farther"),
    ],
)
def test_each_broken_promise_is_a_fault(result: demo.Result, fault: str) -> None:
    found = demo.faults(result)
    assert len(found) == 1
    assert re.search(fault, found[0])


@pytest.mark.filterwarnings("ignore")  # transformers' and torch's own
def test_equal_models_run_once(
    tiny: Path,
    experts_nvfp4: Path,
    windows: NDArray[np.int64],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    variants = [demo.Variant("a", tiny), demo.Variant("b", experts_nvfp4)]
    fidelities: Mapping[str, Fidelity] = {
        v.name: compare_weights(v.folder, tiny, v.read) for v in variants
    }
    loaded = []

    def counted(folder: Path, **options: Any) -> Any:
        loaded.append((folder, options["activations"]))
        return load_model(folder, **options)

    monkeypatch.setattr(demo, "load_model", counted)
    losses = demo._measure(variants, fidelities, windows[:, :256], threads=2)
    assert len(loaded) == 3  # the weights are the same ones; rounded activations are not
    assert losses["a", False] is losses["b", False]
    assert not np.array_equal(losses["a", True], losses["b", True])
    assert not np.array_equal(losses["a", True], losses["a", False])


def test_the_table_says_what_it_has_to(capsys: pytest.CaptureFixture[str]) -> None:
    garbled = demo.Quality(487.6823, Difference(484.9, 435.4222, 535.664), 5.2409)
    command._show(changed(BROKEN[1], weight_only=garbled, activations=garbled), ["one fault"])
    shown = capsys.readouterr().out
    cells: dict[str, list[list[str]]] = {}
    for line in shown.splitlines():
        cell = re.split("  +", line.strip())
        cells.setdefault(cell[0], []).append(cell[1:])
    quality = ["2.9500", "-0.0100 to +0.0100", "0.0700"]
    sqnr = ["20.5", "exact", "exact", "exact", "exact"]
    assert cells[FULL] == [["10.00", "0", *sqnr, "0"], [*quality, *quality]]
    assert cells[MODELOPT][0][1] == "6.76%"
    assert len(cells[BROKEN[0]][0]) == len(cells[FULL][0]) - 1  # validate was not asked
    assert cells[BROKEN[1]][1][1] == "+435.4 to +535.7"
    assert "left out" not in shown
    assert max(map(len, shown.splitlines())) <= 120
    expected = "weight-only: perplexity +0.0020 (95 %: -0.0030 to +0.0140), shift -0.0100 (95 %"
    assert expected in shown
    assert "modelopt's own export makes the experts 3.3% smaller" in shown
    assert "24,570 held-out tokens" in shown
    assert shown.rstrip().endswith("FAULT: one fault")


def test_json_has_the_same_and_is_strict() -> None:
    wrong = demo.Quality(math.nan, Difference(math.inf, 0, 1), 9.0)
    result = changed(BROKEN[0], weight_only=wrong)
    document = json.loads(json.dumps(command._document(result, []), allow_nan=False))
    assert document["rows"][0]["expert_error"] == 0.0
    assert document["rows"][0]["sqnr"]["attn"] == "inf"
    broken = next(r for r in document["rows"] if r["name"] == BROKEN[0])
    difference = {"value": "inf", "low": 0, "high": 1}
    assert broken["weight_only"] == {"perplexity": "nan", "difference": difference, "shift": 9.0}
    assert document["against_modelopt"]["activations"]["perplexity"]["high"] == 0.014


def test_a_checkpoint_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--checkpoint", str(tmp_path / "nothing")]) == 2
    assert "nothing has no config.json" in capsys.readouterr().err


def test_an_output_that_exists(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--checkpoint", str(tiny), "--out", str(tmp_path)]) == 2
    assert "--out takes a new folder" in capsys.readouterr().err


def test_a_model_of_other_tokens_is_refused(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    shutil.copytree(tiny, tmp_path / "model")
    tokenizer = (tmp_path / "model/tokenizer.json").read_text()
    (tmp_path / "model/tokenizer.json").write_text(tokenizer.replace('"x": 120', '"x": 300'))
    with pytest.raises(DSV4Error, match="one token of each byte"):
        demo.run_demo(tmp_path / "model", tmp_path / "out")
    (tmp_path / "model/tokenizer.json").unlink()
    with pytest.raises(DSV4Error, match=r"tokenizer\.json is missing"):
        demo.run_demo(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
