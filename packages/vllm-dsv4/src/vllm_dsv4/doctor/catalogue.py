"""Every fault by its code: what it does to the output, and whether the plugin puts it right.

The codec finds most of them and says what was found, what was expected and what to do; this says
what they mean for serving. A code is stable: scripts may ask for it.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

#: Who puts a fault right: nobody; the plugin's pass over the weights; its look at config.json;
#: or whoever loads it, because it stands in nobody's way.
Handled = Literal["no", "transform", "config", "always"]


class Row(NamedTuple):
    """A fault's effect, in a sentence or two, and who puts it right."""

    effect: str
    handled: Handled = "no"


_FACTOR: Final = "The weight is wrong by a large factor, and the output is noise."
_RANDOM: Final = "The weight's values are random, and the output is fluent nonsense at best."
_NAN: Final = "NaN spreads to every token."
_REFUSED: Final = "Loading stops with an error."
_MISREAD: Final = "The bytes are read as another dtype: loading stops, or values are wrong."
_BELIEVED: Final = "Loaders build parameters by the config and fill them with something else."

CATALOGUE: Final[dict[str, Row]] = {
    # Files.
    "shard-truncated": Row("Loading stops, or a download goes on under a server that starts."),
    "index-outside-folder": Row("Loading would read a file that is not the checkpoint's."),
    "missing-shard": Row("Loading stops, or leaves a part of the model as random memory."),
    "damaged-shard": Row("Loading stops with an error."),
    "index-disagrees": Row("Loading takes tensors from the wrong file, or stops."),
    "stray-file": Row(
        "Without an index vLLM loads every .safetensors file: its tensors take the model's places, "
        "or loading stops."
    ),
    "missing-file": Row("The server starts without what turns text into tokens, or stops."),
    "damaged-file": Row("The server stops at it, or waits for it, before it answers."),
    "unfinished": Row("Some shards are older than others, or not written yet."),
    "index-size": Row(
        "Nothing reads it while loading; the index may be of another export.", "always"
    ),
    # Names.
    "mixed-names": Row("One half of the names is translated and the other is not: loading stops."),
    "block-names": Row("The tensor is not found, and loading stops for want of it."),
    "expert-names": Row("The expert's weight is not found, and loading stops for want of it."),
    "kv-norm-name": Row("The norm is not found: loading stops, or it is random memory."),
    "indexer-compressor-path": Row(
        "The indexer's compressor is not found, or is filled from the outer one: a shape error."
    ),
    "misplaced-tensor": Row("The tensor is not found, and loading stops for want of it."),
    "unknown-tensor": Row(
        "The plugin leaves it out, with a warning; stock vLLM stops.", "transform"
    ),
    "missing-tensor": Row("Loading stops, or the parameter stays random memory."),
    "duplicate-tensor": Row(
        "Stock vLLM takes whichever comes last; the plugin leaves the second spelling out, with a "
        "warning.",
        "transform",
    ),
    "missing-mtp": Row("Speculative decoding cannot start; everything else works.", "always"),
    # Shapes and formats.
    "shape-mismatch": Row("Loading stops with a shape error."),
    "indexer-compressor-shape": Row("Loading stops with a shape error, or picks wrong tokens."),
    "expert-projections-swapped": Row("Loading stops with a shape error."),
    "gate-up-swapped": Row(
        "SwiGLU gates by the wrong half: the output is fluent nonsense, without any error."
    ),
    "dtype-mismatch": Row(_MISREAD),
    "scale-dtype": Row(_MISREAD),
    "unexpected-scale": Row("A loader applies it where it does not belong, or stops at it."),
    "fused-format-mismatch": Row(
        "Stock vLLM fuses the two and reads both alike; the plugin runs both in BF16.", "transform"
    ),
    "wo-a-format": Row(
        "Stock vLLM takes the bytes for another format and fails at the first token; the plugin "
        "goes by the stored dtype.",
        "transform",
    ),
    "mxfp4-experts": Row("Scales of 32 columns are read as scales of 16: a shape error, or noise."),
    "missing-weight": Row(_REFUSED),
    # Scales.
    "e8m0-read-as-e4m3": Row(
        "A byte b means 2^(b - 127) and is read as a small float: every block is wrong by its own "
        "factor, and the output is garbled."
    ),
    "e4m3-read-as-e8m0": Row("Every block is wrong by powers of two, and the output is garbled."),
    "scales-all-ones": Row("Every block is wrong by its own factor: fluent nonsense, repetitions."),
    "nan-scale": Row(_NAN),
    "zero-scale": Row("Whole blocks of the weight are zero, and the output is garbled."),
    "negative-scale": Row("The blocks' signs are turned, and the output is garbled."),
    "bad-scale": Row(_FACTOR),
    "swizzled-scale": Row(
        "Each block is multiplied by another block's scale, and the output is garbled."
    ),
    "missing-weight-scale": Row("The codes have no magnitude: loading stops, or noise."),
    "missing-weight-scale-2": Row(_FACTOR),
    "bad-global-scale": Row(_FACTOR),
    "reciprocal-global-scale": Row(_FACTOR),
    "weight-scale-2-is-one": Row(_FACTOR),
    "fused-scale-mismatch": Row(
        "Stock vLLM keeps the larger one, and the other projection is silently wrong by their "
        "ratio; the plugin rescales its block scales.",
        "transform",
    ),
    # Activations.
    "missing-input-scale": Row(
        "Activations would be quantized with a scale that is not there: the plugin refuses it."
    ),
    "unexpected-input-scale": Row(
        "Stock vLLM drops it or stops; the plugin goes by it.", "transform"
    ),
    "bad-input-scale": Row("Activations become zero, NaN or infinite."),
    "implausible-input-scale": Row("All activations become zero: the layer puts out nothing."),
    "input-scale-is-amax": Row("All but the largest activations are rounded to zero."),
    "input-scales-all-ones": Row("All but the largest activations are rounded to zero."),
    "fused-input-scale-mismatch": Row("Loaders take the larger one for both.", "always"),
    # Values.
    "nonfinite-weight": Row(_NAN),
    "swapped-nibbles": Row(
        "Neighbouring columns are exchanged: fluent nonsense, without any error."
    ),
    "ggml-order": Row("Columns are shuffled within blocks: nonsense, without any error."),
    "transposed": Row(_RANDOM),
    "sign-lost": Row(_RANDOM),
    "scale-as-integer": Row(_FACTOR),
    "e4m3-subnormals": Row("Blocks of small values are far too large."),
    "e8m0-bias": Row("All values are wrong by a factor of four."),
    "single-steps": Row("Some values are rounded once more: slightly less accurate."),
    "double-rounding": Row("Some values are rounded once more: slightly less accurate."),
    "constant-factor": Row("All values are wrong by one factor."),
    "half-mismatch": Row("One of two fused projections is wrong by a factor."),
    "truncated-ue8m0": Row("Blocks are wrong by up to a factor of two."),
    "block-factors": Row("Every block is wrong by its own factor."),
    "differs-from-reference": Row("The weight is not the model's."),
    "not-exact": Row("Values were rounded once more: slightly less accurate."),
    # config.json.
    "config-missing-key": Row(
        "Stock vLLM stops, or leaves a parameter out; the plugin fills it in.", "config"
    ),
    "config-lost-key": Row("Nothing else in the folder says it: loading stops, or guesses."),
    "rope-missing": Row("Positions beyond the trained length are unscaled: long prompts garble."),
    "nested-rope": Row("Stock readers want it flat; the plugin flattens it.", "config"),
    "config-disagrees": Row(f"{_BELIEVED} The plugin goes by the stored dtype.", "transform"),
    "config-value": Row("Stock vLLM and the plugin choose kernels and parameters by it."),
    "config-tied-head": Row(
        "vLLM loads the head that is stored; some other readers take the embedding for it.",
        "always",
    ),
    "config-structure": Row("The model is built with other layers than are stored: loading stops."),
    "config-contradicts-itself": Row(
        "Stock vLLM leaves a quantized module unquantized; the plugin goes by the stored dtype.",
        "transform",
    ),
    "older-config-disagrees": Row(
        "vLLM reads config.json; some other readers take this.", "always"
    ),
    "config-other-names": Row(
        "Stock vLLM applies the entries to no module; the plugin translates them.", "transform"
    ),
    "kv-cache-disagrees": Row(
        "The KV cache is FP8 or BF16 depending on who reads it; --kv-cache-dtype decides.", "always"
    ),
    "config-differs": Row("The model is run with other settings than it was trained with."),
}
