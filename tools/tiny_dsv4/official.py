"""The official mixed format: names, FP8 and MXFP4 weights, config, tokenizer, and reading back.

Written in plain torch on purpose, not with nvfp4_codec: a checkpoint that the codec is tested on
should not come from the codec.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from tiny_dsv4.data import BOS, EOS, PAD
from tiny_dsv4.model import TinyDSV4

Kind = Literal["fp8", "mxfp4", "bf16", "fp32"]

# Roles by transformers' names, first match wins; what nothing matches is stored in BF16.
_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"\.experts\.(gate_up|down)_proj$", "mxfp4"),
    (r"self_attn\.(q_a|q_b|kv|o_a|o_b)_proj\.weight$", "fp8"),
    (r"\.indexer\.q_b_proj\.weight$|\.shared_experts\.\w+\.weight$", "fp8"),
    (r"^mtp\.[eh]_proj\.weight$", "fp8"),
    (r"_hc\.|hc_head\.|sinks$|position_bias$|e_score_correction_bias$|tid2eid$", "fp32"),
)

# transformers' names -> official ones, applied in order.
_RENAMES = (
    (r"^main\.(model\.)?", ""),
    (r"^mtp\.(layer\.)?", "mtp.0."),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"hc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.compressor\.indexer\.(kv_|gate_|position)", r".indexer.compressor.\1"),
    (r"\.compressor\.indexer\.(scorer\.)?", ".indexer."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.(attn|indexer)\.(q|o)_(a|b)_proj\.", r".\1.w\2_\3."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.gate_proj\.", ".wgate."),
)


def kind_of(name: str) -> Kind:
    """Return how the tensor with this name (of TinyDSV4) is stored."""
    return next((kind for pattern, kind in _KINDS if re.search(pattern, name)), "bf16")


def official_name(name: str) -> str:
    """Return the official name of a tensor of TinyDSV4 (fused experts: of their folder)."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _exponent(amax: Tensor, largest: float) -> Tensor:
    """Return the smallest integer e with amax <= largest * 2^e; 0 for a block of zeros."""
    mantissa, exponent = torch.frexp(amax / largest)
    return torch.where(amax > 0, exponent - (mantissa == 0.5).int(), 0)


def _e8m0(exponent: Tensor) -> Tensor:
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``[N, K]``, both multiples of 128, to E4M3 with one E8M0 scale per 128x128.

    Returns codes ``[N, K]``, scales ``[N/128, K/128]`` and the dequantized values.
    """
    N, K = weight.shape
    blocks = weight.float().view(N // 128, 128, K // 128, 128)
    exponent = _exponent(blocks.abs().amax(dim=(1, 3)), 448.0)
    scale = torch.exp2(exponent.float())[:, None, :, None]
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    return codes.view(N, K), _e8m0(exponent), (codes.float() * scale).view(N, K)


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Midpoints; where the even code is the upper one, just below, so that ties go to even.
_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_BOUNDS[1::2] = torch.nextafter(_BOUNDS[1::2], torch.tensor(0.0))


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``[..., K]``, K a multiple of 32, to E2M1 with one E8M0 scale per 32.

    Returns int8 ``[..., K/2]`` (even k in the low nibble), scales ``[..., K/32]`` and the
    dequantized values. The scale is the smallest that does not saturate.
    """
    blocks = weight.float().unflatten(-1, (-1, 32))
    exponent = _exponent(blocks.abs().amax(dim=-1), 6.0)
    scale = torch.exp2(exponent.float())[..., None]
    scaled = blocks / scale
    codes = torch.bucketize(scaled.abs(), _BOUNDS.to(weight.device))
    values = _E2M1.to(weight.device)[codes].copysign(scaled) * scale
    nibbles = (codes + 8 * scaled.signbit()).to(torch.uint8).flatten(-2)
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return packed.view(torch.int8), _e8m0(exponent), values.view_as(weight)


def stored(kind: Kind, weight: Tensor) -> Tensor:
    """Return what reading the stored weight gives, in the weight's dtype."""
    if kind == "fp8":
        return quantize_fp8(weight)[2]
    if kind == "mxfp4":
        return quantize_mxfp4(weight)[2]
    return weight.bfloat16().to(weight.dtype) if kind == "bf16" else weight


@contextmanager
def as_stored(model: TinyDSV4) -> Iterator[None]:
    """Run with the weights as they will be stored, then put the float32 ones back.

    Training steps inside it are quantization-aware with straight-through gradients: the gradient
    at the stored weight moves the float32 one.
    """
    masters = []
    for name, parameter in model.named_parameters():
        kind = kind_of(name)
        if kind != "fp32":
            masters.append((parameter, parameter.data))
            parameter.data = stored(kind, parameter.data)
    try:
        yield
    finally:
        for parameter, master in masters:
            parameter.data = master


def official_tensors(model: TinyDSV4) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint under its official name, on the CPU."""
    out: dict[str, Tensor] = {}

    def put(name: str, kind: Kind, weight: Tensor) -> None:
        if kind in ("fp8", "mxfp4"):
            codes, scale, _ = quantize_fp8(weight) if kind == "fp8" else quantize_mxfp4(weight)
            out[name], out[name.removesuffix("weight") + "scale"] = codes, scale
        else:
            out[name] = weight.bfloat16() if kind == "bf16" else weight.clone()

    for name, tensor in model.state_dict().items():
        kind, target = kind_of(name), official_name(name)
        if kind != "mxfp4":
            put(target, kind, tensor)
            continue
        folder, _, fused = target.rpartition(".")
        for i, expert in enumerate(tensor):
            parts = zip(("w1", "w3"), expert.chunk(2), strict=True)
            for part, weight in parts if fused == "gate_up_proj" else (("w2", expert),):
                put(f"{folder}.{i}.{part}.weight", kind, weight)
    return {name: tensor.cpu().contiguous() for name, tensor in sorted(out.items())}


def read(folder: Path, model: TinyDSV4) -> None:
    """Fill the model and its MTP layer with the dequantized weights of its checkpoint."""
    tensors = load_file(folder / "model.safetensors")

    def get(name: str, kind: Kind) -> Tensor:
        weight = tensors[name]
        if kind not in ("fp8", "mxfp4"):
            return weight
        exponent = tensors[name.removesuffix("weight") + "scale"].view(torch.uint8).int() - 127
        scale = torch.exp2(exponent.float())
        if kind == "fp8":
            return weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        nibbles = torch.stack([weight.view(torch.uint8) & 15, weight.view(torch.uint8) >> 4], -1)
        values = torch.cat([_E2M1, -_E2M1])[nibbles.flatten(-2).int()]
        return values * scale.repeat_interleave(32, -1)

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            kind, target = kind_of(name), official_name(name)
            if kind != "mxfp4":
                tensor.copy_(get(target, kind))
                continue
            folder_name, _, fused = target.rpartition(".")
            parts = ("w1", "w3") if fused == "gate_up_proj" else ("w2",)
            for i, expert in enumerate(tensor):
                matrices = [get(f"{folder_name}.{i}.{part}.weight", kind) for part in parts]
                expert.copy_(torch.cat(matrices))


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are the bytes, with three special tokens above them."""
    # ByteLevel writes printable Latin-1 bytes as themselves and the others from U+0100 upwards.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(b) if b in printable else chr(256 + others.index(b)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    if tokenizer.token_to_id(SPECIAL_TOKENS[-1]) != PAD:
        raise RuntimeError("the special tokens did not follow the 256 bytes")
    return tokenizer


SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>")


def write(folder: Path, model: TinyDSV4, keys: dict[str, Any]) -> None:
    """Write model.safetensors, config.json, generation_config.json and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = official_tensors(model)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }
    begin, end, pad = SPECIAL_TOKENS
    documents: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            **keys,
            "torch_dtype": "bfloat16",
            "expert_dtype": "fp4",
            "quantization_config": quantization,
        },
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": keys["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "bos_token": begin,
            "eos_token": end,
            "pad_token": pad,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def read_back(folder: Path, model: TinyDSV4) -> tuple[nn.Module, dict[str, Any]]:
    """Load the folder with transformers, dequantizing, and compare every tensor with ours.

    Returns the loaded model (float32 on the CPU) and a report; all its counts should be zero.
    """
    from transformers import AutoTokenizer, DeepseekV4ForCausalLM, FineGrainedFP8Config

    read: Any = DeepseekV4ForCausalLM.from_pretrained
    loaded, info = read(
        folder,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        dtype=torch.float32,
        experts_implementation="eager",
        output_loading_info=True,
    )
    theirs = loaded.state_dict()
    with as_stored(model):
        ours = {name: tensor.cpu().clone() for name, tensor in model.main.state_dict().items()}
    differing = [
        name
        for name, tensor in ours.items()
        if name not in theirs or not torch.equal(theirs[name].to(tensor.dtype), tensor)
    ]
    text = "def f(x):\n\treturn 'é'  # ü\n"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    report = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "differing": sorted(differing),
        "tensors": len(ours),
        "tokenizer_is_bytes": ids == list(text.encode()) and tokenizer.decode(ids) == text,
    }
    return loaded.float().eval(), report
