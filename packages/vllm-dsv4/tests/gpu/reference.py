"""What the same weights predict in float32: transformers' forward, teacher-forced, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from modelopt_v4_patches.quality import forward
from modelopt_v4_patches.quality.evaluate import load_model

from .agreement import Logprobs

__all__ = ["load_model", "logprobs", "losses"]


def logprobs(model: nn.Module, sequences: Sequence[Sequence[int]]) -> list[Logprobs]:
    """Each sequence's natural logprobs of what comes next, ``[length - 1, vocabulary]``."""
    found = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.inference_mode():
            logits = model(ids, attention_mask=forward.no_mask(ids), use_cache=False).logits
            found.append(F.log_softmax(logits[0, :-1].float(), dim=-1).numpy())
    return found


def losses(found: Logprobs, sequence: Sequence[int]) -> Logprobs:
    """The tokens' negative log-likelihoods, ``[length - 1]``."""
    tokens = np.asarray(sequence[1:])
    picked: Logprobs = -found[np.arange(len(tokens)), tokens]
    return picked
