"""Train the tiny DeepSeek-V4 that the tests and demos use, and write it in the official format.

    python tools/train_tiny_dsv4.py --device cuda --minutes 4.5 --out DIR     # one H200
    python tools/train_tiny_dsv4.py --smoke --out DIR                         # CPU, the whole path

A byte-level model of Python source (the standard library of the running Python): four layers with
compress ratios 0, 128, 4, 128, the first routed by hash, and a trained multi-token-prediction
layer. Its dimensions are ones that vLLM's Hopper kernels accept. Training is driven by time:

    0    .. 0.55  contexts of 2,048: no context is long enough for the indexer to choose
    0.55 .. 0.75  contexts of 4,096, everything visible; the indexer learns to imitate attention
    0.75 .. 1     contexts of 4,096, the indexer chooses; weights as they will be stored

DIR gets the checkpoint, its tokenizer and training.json: what was trained on what, the losses, and
perplexities with parts of the model switched off. The held-out text is not stored: the rule that
chose it and its SHA-256 are. Of its two sides only validation is read here. Afterwards,
settle_tiny_dsv4.py calibrates the result.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tiny_dsv4 import data, official
from tiny_dsv4.model import IndexerTraining, TinyDSV4, transformers_own
from torch import Tensor

CONFIG: dict[str, Any] = {
    "vocab_size": data.VOCAB_SIZE,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "compress_ratios": [0, 128, 4, 128, 0],  # the last one is the MTP layer's
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": data.BOS,
    "eos_token_id": data.EOS,
    "pad_token_id": None,
}
SEED = 20260
PEAK_LR, WARMUP, WEIGHT_DECAY = 2e-3, 0.04, 0.1
MTP_WEIGHT, INDEXER_WEIGHT = 0.2, 0.1
FAR_DROP = 0.2  # share of sequences in which ratio 4 is blind, so that ratio 128 must do its work
REPEATS = 8  # one sequence in so many contains a long-range copy
DENSE_FROM, SPARSE_FROM = 0.55, 0.75


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--minutes", type=float, default=4.5, help="of training, all in all")
    parser.add_argument("--tokens", type=int, default=32768, help="per step")
    parser.add_argument("--context", type=int, default=4096, help="the longest trained on")
    parser.add_argument("--steps", type=int, default=0, help="stop by steps, not by time")
    parser.add_argument("--smoke", action="store_true", help="a minute on the CPU")
    args = parser.parse_args()
    keys = dict(CONFIG)
    if args.smoke:
        args.device, args.tokens, args.context, args.steps = "cpu", 512, 512, 8
        keys["index_topk"] = 64

    started = time.perf_counter()
    device = torch.device(args.device)
    modules = data.standard_library()
    stream = data.training_stream(modules)
    held_out = data.excerpts(modules, "validation")
    held_out = {name: held_out[name] for name in list(held_out)[: 1 if args.smoke else 16]}
    model = TinyDSV4(keys, SEED).to(device)
    say(f"{sum(p.numel() for p in model.parameters()):,} weights, {stream.numel():,} tokens")
    curve = train(model, data.Batches(stream.to(device), SEED), held_out, args)
    trained = time.perf_counter() - started

    official.write(args.out, model, keys)
    record = {
        "model": "a tiny DeepSeek-V4 trained on the Python standard library, for tests",
        "licence": {
            "weights": "Apache-2.0, as this repository",
            "text": "sources of the Python standard library, PSF-2.0; not included",
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "settings": {k: v if k != "out" else None for k, v in vars(args).items()}
        | {"seed": SEED, "peak_lr": PEAK_LR, "far_drop": FAR_DROP, "mtp_weight": MTP_WEIGHT},
        "mtp": "trained jointly with the main model",
        "data": {
            "modules": len(modules),
            "bytes": sum(map(len, modules.values())),
            "sha256": data.digest(modules),
            "training_tokens_in_stream": stream.numel(),
            "held_out_rule": data.RULES["validation"],
            "held_out_excerpts": list(held_out),
            "held_out_sha256": data.digest(held_out),
        },
        "steps": curve[-1]["step"],
        "tokens_seen": curve[-1]["tokens"],
        "training_seconds": round(trained, 1),
        "curve": curve,
    }
    save(args.out, record)
    record["perplexity"] = measure(model, held_out, args)
    save(args.out, record)
    loaded, report = official.read_back(args.out, model)
    ids = windows(held_out, args.context, device)[:1]
    with torch.inference_mode():
        theirs = loaded.to(device)(ids, use_cache=False).logits.float()
        with official.as_stored(model):
            report["max_logit_difference"] = float((model(ids) - theirs).abs().max())
    record["read_back_by_transformers"] = report
    record["total_seconds"] = round(time.perf_counter() - started, 1)
    save(args.out, record)
    for key in ("data", "perplexity", "read_back_by_transformers", "total_seconds"):
        parts = record[key] if isinstance(record[key], dict) else {"": record[key]}
        say("\n".join(f"{key} {name}: {json.dumps(value)}" for name, value in parts.items()))
    for file in sorted(args.out.iterdir()):
        say(f"{file.stat().st_size:>10,} {file.name}")


def say(text: str) -> None:
    print(text, flush=True)


def save(folder: Path, record: dict[str, Any]) -> None:
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def train(
    model: TinyDSV4, batches: data.Batches, held_out: dict[str, bytes], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Train until the time or the steps are used up; return the loss curve."""
    device = batches.stream.device
    cuda = device.type == "cuda"
    optimizer = make_optimizer(model, fused=cuda)
    indexers = IndexerTraining(model)
    curve: list[dict[str, Any]] = []
    started = reported = time.perf_counter()
    budget = args.minutes * 60
    step = tokens = 0
    mode = ""
    torch.set_float32_matmul_precision("high")
    while True:
        elapsed = time.perf_counter() - started
        progress = step / args.steps if args.steps else elapsed / budget
        if progress >= 1:
            break
        wanted = "off" if progress < DENSE_FROM else "dense" if progress < SPARSE_FROM else "sparse"
        if wanted != mode:
            mode = wanted
            indexers.mode(mode)
            say(f"step {step}, {elapsed:.0f} s: indexer {mode}")
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(progress / WARMUP, (1 - progress) / (1 - WARMUP), 1)
        length = args.context // 2 if mode == "off" else args.context
        rows = max(args.tokens // length, 1)
        ids = batches.draw(rows, length + 2, rows // REPEATS)
        drop = torch.rand(rows, generator=batches.random) < FAR_DROP
        for attention in model.attentions(4):
            attention.far_drop = drop.to(device)

        model.train()
        precision = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
        with official.as_stored(model) if mode == "sparse" else nullcontext():
            with precision:
                logits = model(ids[:, :length])
                ahead = model.mtp(model.main, model.streams, ids[:, 1 : length + 1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:-1].flatten())
            mtp_loss = F.cross_entropy(ahead.flatten(0, 1).float(), ids[:, 2:].flatten())
            index_loss = indexers.loss() if mode != "off" else torch.zeros((), device=device)
            (loss + MTP_WEIGHT * mtp_loss + INDEXER_WEIGHT * index_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            model.balance(5e-3 if progress < 0.3 else 1e-3 if progress < 0.9 else 0.0)
        step, tokens = step + 1, tokens + rows * length

        now = time.perf_counter()
        if args.steps or now - reported > 6 or step == 20:
            reported = now
            curve.append(
                {
                    "step": step,
                    "seconds": round(now - started, 1),
                    "tokens": tokens,
                    "loss": round(loss.item(), 4),
                    "mtp_loss": round(mtp_loss.item(), 4),
                    "indexer_loss": round(index_loss.item(), 4),
                    "gradient_norm": round(norm.item(), 3),
                }
            )
            if len(curve) % 5 == 0:
                nll = nlls(model, windows(held_out, args.context, device)[:4])
                curve[-1]["held_out_loss"] = round(nll.mean().item(), 4)
            say(json.dumps(curve[-1]))
    indexers.mode("sparse")
    if cuda:
        say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return curve


def make_optimizer(model: TinyDSV4, fused: bool) -> torch.optim.Optimizer:
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and official.kind_of(name) != "fp32"
        (matrices if is_matrix else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=fused)


def windows(held_out: dict[str, bytes], length: int, device: torch.device) -> Tensor:
    """Return the held-out text as int64 ``[windows, length]``."""
    text = bytearray(b"".join(held_out.values()))
    return torch.frombuffer(text, dtype=torch.uint8).long().view(-1, length).to(device)


@torch.inference_mode()
def nlls(model: TinyDSV4, ids: Tensor, bf16: bool = False) -> Tensor:
    """Return every token's negative log-likelihood in nats, ``[windows, length - 1]``, eval mode.

    In float32 without TF32, or under BF16 autocast.
    """
    model.eval()
    torch.set_float32_matmul_precision("highest")
    out = []
    for window in ids:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            logits = model(window[None])
        out.append(F.cross_entropy(logits[0, :-1].float(), window[1:], reduction="none"))
    torch.set_float32_matmul_precision("high")
    return torch.stack(out)


@contextmanager
def zeroed(*tensors: Tensor) -> Iterator[None]:
    """Set tensors to zero for a while."""
    saved = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    try:
        yield
    finally:
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)


@torch.no_grad()
def measure(
    model: TinyDSV4, held_out: dict[str, bytes], args: argparse.Namespace
) -> dict[str, Any]:
    """Return held-out perplexities: by precision, with parts zeroed, and the MTP layer's hits."""
    device = next(model.parameters()).device
    ids = windows(held_out, args.context, device)[: 3 if args.smoke else None]
    every = model.main.model.layers

    def report(nll: Tensor, reference: Tensor) -> dict[str, float]:
        return {
            "perplexity": round(math.exp(nll.mean().item()), 4),
            "second_half": round(math.exp(nll[:, args.context // 2 :].mean().item()), 4),
            "mean_abs_nll_change": round((nll - reference).abs().mean().item(), 4),
        }

    exact = nlls(model, ids)
    out: dict[str, Any] = {
        "windows": list(ids.shape),
        "trained_float32": report(exact, exact),
        "trained_bf16_autocast": report(nlls(model, ids, bf16=True), exact),
    }
    with official.as_stored(model):
        mixed = nlls(model, ids)
        out["stored_float32"] = report(mixed, mixed)
        out["stored_bf16_autocast"] = report(nlls(model, ids, bf16=True), mixed)
        parts: dict[str, Callable[[], list[Tensor]]] = {
            "ratio_128_compressors": lambda: [
                a.compressor.kv_proj.weight.data for a in model.attentions(128)
            ],
            "ratio_4_compressor": lambda: [
                a.compressor.kv_proj.weight.data for a in model.attentions(4)
            ],
            "indexer_wq_b": lambda: [
                a.compressor.indexer.q_b_proj.weight.data for a in model.attentions(4)
            ],
            "sinks": lambda: [layer.self_attn.sinks.data for layer in every],
            "one_expert_of_layer_1": lambda: [every[1].mlp.experts.down_proj.data[0]],
            "hash_layer_experts": lambda: [every[0].mlp.experts.down_proj.data],
        }
        zero = {}
        for name, tensors in parts.items():
            with zeroed(*tensors()):
                zero[name] = report(nlls(model, ids), mixed)
        out["stored_with_zeroed"] = zero
        out["mtp"] = mtp_hits(model, ids)
        out["eager_attention_max_logit_difference"] = compare_with_eager(model, ids[:1])
    out["expert_load_shares"] = [
        [round(x, 4) for x in (load / load.sum()).tolist()]
        for load in (layer.mlp.experts.load.float() for layer in every)
    ]
    out["sinks"] = [[round(x, 2) for x in layer.self_attn.sinks.tolist()] for layer in every]
    return out


def mtp_hits(model: TinyDSV4, ids: Tensor) -> dict[str, float]:
    """Return how often the MTP layer's first choice is the main model's next one, and its loss."""
    hits, losses = [], []
    for window in ids:
        logits = model(window[None])
        ahead = model.mtp(model.main, model.streams, window.roll(-1)[None])[:, :-2]
        hits.append((ahead.argmax(-1) == logits[:, 1:-1].argmax(-1)).float().mean())
        losses.append(F.cross_entropy(ahead[0].float(), window[2:]))
    return {
        "greedy_acceptance": round(torch.stack(hits).mean().item(), 4),
        "perplexity": round(math.exp(torch.stack(losses).mean().item()), 4),
    }


def compare_with_eager(model: TinyDSV4, ids: Tensor) -> float:
    """Return the largest difference from transformers' own attention and expert loop."""
    torch.set_float32_matmul_precision("highest")
    ours = model(ids)
    with transformers_own(model) as main:
        theirs = main(ids, use_cache=False).logits
    return float((ours - theirs).abs().max())


if __name__ == "__main__":
    main()
