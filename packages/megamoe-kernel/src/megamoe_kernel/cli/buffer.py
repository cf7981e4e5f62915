"""``megamoe buffer``: how much memory the symmetric buffer takes on each rank."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nvfp4_codec.cli_frame import OK, add_command
from nvfp4_codec.cli_output import say_json, show_table

from ..models import MODELS

if TYPE_CHECKING:
    from nvfp4_codec.cli_frame import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(commands, "buffer", "show the memory of the symmetric buffer by EP size")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[256, 8192],
        metavar="N",
        help="tokens of a rank at most (default: 256 8192)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0; 2 for sizes that cannot be."""
    from ..buffer_sizes import size_heads, size_rows

    tokens = tuple(dict.fromkeys(arguments.tokens))
    heads, rows = size_heads(tokens), list(size_rows(MODELS[arguments.model], tokens))
    if arguments.json:
        sizes = [dict(zip(heads, row, strict=True)) for row in rows]
        say_json({"model": arguments.model, "unit": "MB, in brackets: shared", "sizes": sizes})
    else:
        show_table(heads, rows, left=2, title="MB of a rank (in brackets: what peers share)")
    return OK
