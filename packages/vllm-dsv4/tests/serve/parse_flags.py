"""vLLM's own reading of ``vllm serve`` lines, as JSON on standard output.

Run as a program, in a process of its own: ``parse_flags.py LINES`` with a JSON list of argument
lists, each what follows ``vllm serve``.
"""

from __future__ import annotations

import json
import sys
from unittest.mock import patch


def main() -> None:
    import vllm.platforms

    # The parser asks for the device's default; there is none on a machine without a GPU.
    with patch.object(vllm.platforms.current_platform, "device_type", "cuda"):
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers.registry import TokenizerRegistry
        from vllm.tool_parsers import ToolParserManager
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
        parsed = []
        for line in json.loads(sys.argv[1]):
            arguments = parser.parse_args(line)
            validate_parsed_serve_args(arguments)
            parsed.append({name: json_able(value) for name, value in vars(arguments).items()})
        document = {
            "parsed": parsed,
            "tool_parsers": sorted(ToolParserManager.list_registered()),
            "reasoning_parsers": sorted(ReasoningParserManager.list_registered()),
            "tokenizers": sorted(TokenizerRegistry.tokenizers),
        }
    sys.stdout.write(json.dumps(document) + "\n")


def json_able(value: object) -> object:
    try:
        json.dumps(value)
    except TypeError:
        return repr(value)
    return value


if __name__ == "__main__":
    main()
