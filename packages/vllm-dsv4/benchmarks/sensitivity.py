"""How far damage to a DeepSeek-V4 moves its logprobs, beside what sound rounding does.

The gates of `tests/gpu` are chosen by this table: each must lie above every sound row of its
column. A cell is mean / KL of the prompts of 17 to 2,600 tokens, `*` where the gate refuses it; the
indexer has nothing to choose there and shows on the prompt of 8,000 alone. Runs on the CPU, on the
float32 model of tests/assets/tiny-dsv4 with emulated rounding; half an hour on one core.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "packages/vllm-dsv4/tests/gpu"
SOUND = "as it is"
ON_THE_LONG_PROMPT = ("indexer: negated", "ratio-4 compressor: zero")


def load(name: str) -> ModuleType:
    """A module of the tests by its path."""
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def predictions(net: Any, sequences: Sequence[Sequence[int]]) -> list[Any]:
    """Natural logprobs of each sequence, ``[length - 1, vocabulary]``."""
    import torch

    from modelopt_v4_patches.quality import forward

    found = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.inference_mode():
            logits = net(ids, attention_mask=forward.no_mask(ids), use_cache=False).logits
            found.append(logits[0, :-1].float().log_softmax(dim=-1).numpy())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    from modelopt_v4_patches.quality.evaluate import load_model

    gates, damage, texts = (load(name) for name in ("agreement", "damage", "texts"))
    columns = {
        "full": (False, gates.FULL, {"wo_a": "fp8"}),
        "FP8 linears": (False, gates.FP8, {"wo_a": "fp8", "linears": "fp8"}),
        "heavy": (True, gates.HEAVY, {"wo_a": "fp8"}),
        "heavy, wo_a BF16": (True, gates.HEAVY_BF16, {}),
    }
    nets = {heavy: load_model(ROOT / "tests/assets/tiny-dsv4") for heavy in (False, True)}
    damage.emphasize(nets[True])
    short, long = texts.prompts(), [texts.long_prompt()]
    rows: list[tuple[str, str, list[list[int]], Any]] = [(SOUND, "", short, None)]
    rows += [(name, "", short, how) for name, how in damage.DAMAGE.items()]
    rows.append((SOUND, ", 8,000 tokens", long, None))
    rows += [(n, ", 8,000 tokens", long, damage.DAMAGE[n]) for n in ON_THE_LONG_PROMPT]
    expected = {
        (heavy, len(prompts)): predictions(net, prompts)
        for heavy, net in nets.items()
        for prompts in (short, long)
    }
    numbers = []
    print(f"| damage | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, where, prompts, how in rows:
        cells = []
        for column, (heavy, gate, rounding) in columns.items():
            net = nets[heavy]
            context = nullcontext() if how is None else damage.damaged(net, how)
            with context, damage.rounded(net, **rounding):
                found = gates.agreement(predictions(net, prompts), expected[heavy, len(prompts)])
            refused = bool(gate.refusals(found))
            cells.append(f"{found.mean:.3f} / {found.kl:.4f}{'*' if refused else ''}")
            numbers.append(
                {"damage": name + where, "column": column, "refused": refused, **vars(found)}
            )
        print(f"| {name}{where} | {' | '.join(cells)} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
