"""Validation of expert shards in one process: every byte of output and source, SHA-256 included.

    python packages/modelopt-v4-patches/benchmarks/validate.py --gib 2 --rounds 3

Experts have DeepSeek-V4-Pro's size (3072 x 7168). What is timed: ``examine`` with
``sample="all"`` against the source, both in the page cache, and ``sample=0``, which reads headers
only. A byte is broken first, which must be found. Prints JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from modelopt_v4_patches.export import ExportOptions, export_checkpoint
from modelopt_v4_patches.validate import examine


def neighbour(name: str) -> Any:
    """Another benchmark of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(source: Path, output: Path) -> None:
    """One changed code must be found, and nothing in the unchanged checkpoint."""
    healthy = {f.code for f in examine(output, against=source).findings}
    # no tokenizer, and a config of sizes only
    assert healthy <= {"missing-file", "config-missing-key"}, healthy
    shard = max(output.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    place = shard.stat().st_size // 2
    with shard.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        for value in (byte ^ 1, byte):
            file.seek(place)
            file.write(bytes([value]))
            file.flush()
            codes = {f.code for f in examine(output, against=source, sample="all").findings}
            assert ("manifest-mismatch" in codes) == (value != byte), codes


def timed(rounds: int, source: Path, output: Path, sample: Any) -> list[float]:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        examine(output, against=source, sample=sample)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    bench = neighbour("export")
    with tempfile.TemporaryDirectory() as name:
        source, output = Path(name) / "official", Path(name) / "out"
        snapshot = Path(name) / "amax.safetensors"
        source.mkdir()
        size = bench.write_input(source, int(arguments.gib * 2**30))
        bench.write_snapshot(snapshot, json.loads((source / "config.json").read_text()))
        export_checkpoint(source, snapshot, output, ExportOptions("experts"))
        size += sum(path.stat().st_size for path in output.glob("*.safetensors"))
        check(source, output)
        whole = timed(arguments.rounds, source, output, "all")
        headers = timed(arguments.rounds, source, output, 0)
    result = {
        "benchmark": "validation of NVFP4 experts against their source in one process",
        "bytes_of_both": size,
        "cpus": os.cpu_count(),
        "load_after": os.getloadavg()[0],
        "seconds": [round(value, 3) for value in whole],
        "headers_only_seconds": [round(value, 3) for value in headers],
        "gb_per_second_of_both": size / statistics.median(whole) / 1e9,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
