"""The norm of DeepSeek-V4 in transformers, by itself and in a model loaded as BF16."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from modelopt_v4_patches import apply_patches
from modelopt_v4_patches.patches.rms_norm import MODULE, PATCH

TINY = {
    "vocab_size": 64,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "q_lora_rank": 64,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "max_position_embeddings": 256,
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
    "qk_rope_head_dim": 32,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_topk": 4,
    "hc_mult": 2,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_computes_in_float32_and_returns_its_inputs_dtype(dtype: torch.dtype) -> None:
    norm: Any = import_module(MODULE).DeepseekV4RMSNorm(64).float()
    norm.weight.data = torch.linspace(0.5, 2, 64)
    x = torch.linspace(-4, 4, 640).reshape(10, 64).to(dtype)
    apply_patches()
    with torch.no_grad():
        found = norm(x)
    expected = rms_norm(x.float(), (64,), norm.weight, norm.variance_epsilon).to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


def test_one_token_through_a_model_loaded_as_bf16(tmp_path: Path) -> None:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**TINY))
        model.to(torch.bfloat16).save_pretrained(tmp_path)
        model = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    token = torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad():
        kept = model.model.norm.weight.dtype == torch.float32  # from transformers 5.9 on
        if PATCH.needed() and kept:
            with pytest.raises(RuntimeError, match="same dtype"):
                model(token)
        apply_patches()
        assert model(token).logits.isfinite().all()
