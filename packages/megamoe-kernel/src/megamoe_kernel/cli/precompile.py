"""``megamoe precompile``: compile a model's kernels ahead of time; needs no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_codec.cli_frame import OK, add_command
from nvfp4_codec.cli_output import say, say_json, show_table

from ..jit.targets import TARGETS, check_target
from ..models import MODELS

if TYPE_CHECKING:
    from nvfp4_codec.cli_frame import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(commands, "precompile", "compile a model's kernels into the cache")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--ep", type=int, default=1, help="ranks of expert parallelism (default 1)")
    parser.add_argument(
        "--arch",
        nargs="+",
        action="extend",
        required=True,
        metavar="ARCH",
        help=f"one or more of: {', '.join(TARGETS)}",
    )
    parser.add_argument(
        "--compiler",
        choices=("nvrtc", "nvcc"),
        default="nvrtc",
        help="nvrtc comes with torch (default); nvcc of a CUDA toolkit on PATH",
    )
    parser.add_argument(
        "--cache", type=Path, help="instead of $MEGAMOE_KERNEL_CACHE or the user's cache folder"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0; 2 for targets that cannot be, with the reason, and where nothing compiles."""
    targets = [check_target(name) for name in dict.fromkeys(arguments.arch)]
    from ..buffer_sizes import check_num_ranks
    from ..jit.cache import CubinCache
    from ..jit.compile import compile_kernel
    from ..kernels import kernels_of

    check_num_ranks(arguments.ep)
    shape = MODELS[arguments.model]
    wanted = [(t, source) for t in targets for source in kernels_of(shape, arguments.ep, t)]
    cache = CubinCache(arguments.cache)
    rows = []
    for target, source in wanted:
        made = compile_kernel(source, target, compiler=arguments.compiler, cache=cache)
        rows.append(
            {
                "kernel": source.name,
                "block_rows": source.block_rows,
                "target": target,
                "bytes": len(made.cubin),
                "seconds": round(made.seconds, 3),
                "cached": made.cached,
            }
        )
    if arguments.json:
        say_json({"cache": str(cache.folder), "kernels": rows})
        return OK
    heads = ["kernel", "target", "tokens of a block", "bytes", "seconds", ""]
    shown = [
        [
            str(row["kernel"]),
            str(row["target"]),
            str(row["block_rows"] or ""),
            f"{row['bytes']:,}",
            f"{row['seconds']:.2f}",
            "was there" if row["cached"] else "compiled",
        ]
        for row in rows
    ]
    show_table(heads, shown, left=2)
    say(f"in {cache.folder}")
    return OK
