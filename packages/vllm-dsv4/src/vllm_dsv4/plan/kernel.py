"""Whether a MoE backend of another package runs a planned layer."""

from __future__ import annotations

from ..moe_backend import MoEShape, make_backend
from ..stored import Stored
from .fit import Plan


def check_kernel(name: str, stored: Stored, found: Plan) -> None:
    """Asks the backend as vLLM will; raises OptionError as `make_backend` does."""
    make_backend(name, found.gpus.capability, _moe_shape(stored, found), None)


def _moe_shape(stored: Stored, found: Plan) -> MoEShape:
    """A MoE layer of the first rank, as vLLM will build it."""
    config, ranks = stored.schema.config, found.deployment.experts_divided
    dims = config.dimensions
    return MoEShape(
        num_experts=config.num_experts,
        num_local_experts=config.num_experts // ranks,
        first_expert=0,
        top_k=dims["top_k"],
        hidden_size=dims["hidden"],
        intermediate_size=dims["inner"],
        max_num_tokens=found.limits.step_tokens(found.gpus),
        swiglu_limit=stored.config.get("swiglu_limit"),
        ep_size=ranks,
    )
