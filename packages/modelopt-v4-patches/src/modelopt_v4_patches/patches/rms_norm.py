"""DeepseekV4RMSNorm returns the dtype it was given."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..patch import Function, Patch

if TYPE_CHECKING:
    from torch import Tensor, nn

MODULE = "transformers.models.deepseek_v4.modeling_deepseek_v4"


def _wrap(_: Function) -> Function:
    def forward(self: Any, hidden_states: Tensor) -> Any:
        x = hidden_states.float()
        x = x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return (self.weight * x).to(hidden_states.dtype)

    return forward


def _probe() -> bool:
    import torch

    norm: nn.Module = import_module(MODULE).DeepseekV4RMSNorm(2).float()
    with torch.no_grad():
        result: Tensor = norm(torch.ones(1, 2, dtype=torch.bfloat16))
    return result.dtype == torch.bfloat16


PATCH = Patch(
    name="rms-norm",
    package="transformers",
    module=MODULE,
    target="DeepseekV4RMSNorm.forward",
    versions=">=5.8,<5.25",
    sources={"d676bfe9af0e524d": "5.8 to 5.19", "af4a5745ab74072d": "5.20 to 5.24"},
    parameters=("self", "hidden_states"),
    reason="float32 norm weights turn BF16 activations into float32, which the next linear refuses",
    upstream="fixed in transformers 5.20; goes when 5.20 is the oldest supported",
    wrap=_wrap,
    probe=_probe,
)
