"""Hours for the whole of DeepSeek-V4-Pro on 1, 8 and 64 nodes, from measured rates.

    python packages/modelopt-v4-patches/benchmarks/scale.py --export 1.04 --dequant 1.25 \\
        --validate 0.67 --disk 1.25

Prints the table of docs/scale.md, whose formula this is. Rates are GB/s: ``--export`` of input and
``--dequant`` of output in one process (benchmarks/export.py, dequant.py), ``--validate`` of
output plus source in one process (validate.py), ``--disk`` what one node's disk reads and writes
together (taken from cp and fsync, in export.py, which reads from memory). Sizes are computed from
the official config.json.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from modelopt_v4_patches.policy import ExportOptions
from nvfp4_codec.schemas.deepseek_v4 import Entry, Layout, ModelConfig, Schema

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "packages/nvfp4-codec/tests/schemas/data/pro.config.json"
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I64": 8}
NODES = (1, 8, 64)


def size(schema: Schema, layout: Callable[[Entry], Layout | None]) -> float:
    """GB of all tensors stored so."""
    total = 0
    for entry in schema.entries():
        chosen = layout(entry)
        for spec in schema.stored(entry, chosen) if chosen is not None else ():
            total += BYTES[spec.dtype] * math.prod(spec.shape)
    return total / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for rate in ("export", "dequant", "validate", "disk"):
        parser.add_argument(f"--{rate}", type=float, required=True, metavar="GB/s")
    parser.add_argument("--processes", type=int, default=16, help="on each node")
    parser.add_argument("--shards", type=int, default=64)
    a = parser.parse_args()
    schema = Schema(ModelConfig.from_file(CONFIG))
    official, bf16 = size(schema, lambda entry: "official"), size(schema, lambda entry: "plain")
    experts = size(schema, ExportOptions(preset="experts").layout)
    full = size(schema, ExportOptions(preset="full").layout)
    say = sys.stdout.write
    say(f"official {official:.0f} GB, BF16 {bf16:.0f} GB, ")
    say(f"experts {experts:.0f} GB, full {full:.0f} GB\n\n")
    # name: (GB that the processes' rate counts, GB that disks read and write, rate, parts)
    work = {
        "dequant": (bf16, official + bf16, a.dequant, a.shards),
        "export": (official, official + experts, a.export, a.shards),
        "validate --sample all": (experts + official, experts + official, a.validate, 2**20),
    }
    say("| step | 1 process | " + " | ".join(f"{n} node{'s' * (n > 1)}" for n in NODES))
    say(" |\n|---|" + "---|" * (len(NODES) + 1) + "\n")
    for name, (counted, moved, rate, parts) in work.items():
        alone = max(counted / rate, moved / a.disk)
        cells = [duration(alone)]
        for nodes in NODES:
            rounds = math.ceil(parts / (nodes * a.processes)) / parts
            cells.append(duration(max(rounds * counted / rate, moved / (nodes * a.disk))))
        say(f"| `{name}` | " + " | ".join(cells) + " |\n")
    return 0


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    sys.exit(main())
