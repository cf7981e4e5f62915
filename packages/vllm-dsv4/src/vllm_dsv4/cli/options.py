"""The options of `vllm_dsv4.options.Options` on a command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from ..options import Options

_DTYPES = {
    "attn": "wq_a, wkv, wq_b and wo_b",
    "shared": "the shared experts; fp8 or bf16 lets MegaMoE fuse them",
    "indexer": "the indexer's wq_b",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds how linears run, and what else the plugin is told."""
    from ..options import Dtype, WoADtype

    for part, help in _DTYPES.items():
        parser.add_argument(
            f"--{part}-dtype", choices=get_args(Dtype), help=f"{help} (default: stored)"
        )
    parser.add_argument(
        "--wo-a-dtype", choices=get_args(WoADtype), help="attention's wo_a (default: fp8)"
    )
    parser.add_argument(
        "--verify-load",
        action="store_true",
        default=None,
        help="compare every converted layer after loading",
    )
    parser.add_argument("--moe-kernel", metavar="NAME", help="a MoE backend of another package")


def given_options(arguments: argparse.Namespace) -> dict[str, object]:
    """The options that were given, by their names in `Options`."""
    from ..options import Options

    found = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    return {name: value for name, value in found.items() if value is not None}


def read_options(arguments: argparse.Namespace) -> Options:
    """The options as given; raises OptionError as `Options` does."""
    from ..options import Options

    return Options.from_mapping(given_options(arguments))
