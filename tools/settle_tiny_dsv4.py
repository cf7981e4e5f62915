"""Fit the tiny DeepSeek-V4's one free scalar, routed_scaling_factor, on text it was not trained on.

    python tools/settle_tiny_dsv4.py DIR        # after train_tiny_dsv4.py; on the CPU, half an hour

The trained model has read its text several times and is too sure of itself: smaller experts make it
better on new text. A checkpoint whose rounding happens to shrink them would then look better than
an exact one. So the factor that scales all routed experts is calibrated as one calibrates any
over-confident model: by a line search of the loss on the validation side of the held-out modules
(see tiny_dsv4/data.py). The evaluation side is not read. No weight changes.

DIR/config.json gets the factor, DIR/training.json how it was chosen.
"""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_dsv4 import data, official
from tiny_dsv4.model import TinyDSV4
from train_tiny_dsv4 import CONFIG, mtp_hits, nlls, save, say, windows

STEP = 0.05  # of the trained factor, between the three points of a parabola
DECIMALS = 2
CONTEXT = 4096
MTP_WINDOWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--windows", type=int, help="of 4,096 tokens (default: all there are)")
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text())
    record = json.loads((args.folder / "training.json").read_text())
    trained = CONFIG["routed_scaling_factor"]
    model = TinyDSV4({key: config[key] for key in CONFIG}, seed=0)
    official.read(args.folder, model)

    modules = data.standard_library()
    excerpts = data.excerpts(modules, "validation")
    ids = windows(excerpts, CONTEXT, torch.device("cpu"))[: args.windows]
    losses: dict[float, float] = {}

    def loss(factor: float) -> float:
        if factor not in losses:
            set_factor(model, factor)
            losses[factor] = nlls(model, ids).mean().item()
            say(f"routed_scaling_factor {factor}: validation loss {losses[factor]:.6f}")
        return losses[factor]

    chosen = line_search(loss, trained)
    mtp = {}
    with torch.inference_mode():  # a graph over whole windows would take tens of gigabytes
        for factor in (trained, chosen):
            set_factor(model, factor)
            mtp[str(factor)] = mtp_hits(model, ids[:MTP_WINDOWS])
    record["settling"] = {
        "what": "routed_scaling_factor, of all layers alike, by line search of the validation loss",
        "routed_scaling_factor": {"trained": trained, "settled": chosen},
        "side_rule": data.RULES["validation"],
        "validation_excerpts": list(excerpts),
        "validation_sha256": data.digest(excerpts),
        "windows": list(ids.shape),
        "losses": {str(factor): round(value, 6) for factor, value in sorted(losses.items())},
        f"mtp_on_{MTP_WINDOWS}_windows": mtp,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": "cpu",
    }
    config["routed_scaling_factor"] = chosen
    save(args.folder, record)
    (args.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    say(f"settled on {chosen}; MTP: {json.dumps(mtp)}")


def line_search(loss: Callable[[float], float], start: float) -> float:
    """Return the factor of least loss, to DECIMALS, near ``start``.

    Three points STEP apart are moved along until the middle one is the lowest; the vertex of the
    parabola through them is the answer, if its loss is lower still.
    """
    step = STEP * start
    middle = start - step
    while True:
        points = [round(middle + i * step, 6) for i in (-1, 0, 1)]
        low, center, high = map(loss, points)
        if center <= min(low, high):
            break
        middle += step if high < low else -step
    vertex = middle + step / 2 * (low - high) / (low - 2 * center + high)
    candidates = (round(vertex, DECIMALS), points[1])
    return min(candidates, key=loss)


def set_factor(model: TinyDSV4, factor: float) -> None:
    """Set what config.json's routed_scaling_factor would, in the main model and the MTP layer."""
    routers: list[Any] = [m for m in model.modules() if hasattr(m, "routed_scaling_factor")]
    for router in routers:
        router.routed_scaling_factor = factor


if __name__ == "__main__":
    main()
