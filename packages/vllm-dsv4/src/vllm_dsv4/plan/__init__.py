"""What serving a model takes on given GPUs, and whether it fits: arithmetic, without a GPU.

`plan` adds up `weights`, `buffers` and `kv_cache` for the fullest GPU of a `Deployment`. Every
formula names its source in vLLM 0.33.0; where vLLM measures instead, ours is an estimate.
"""

from .buffers import Limits
from .deployment import FP4, Deployment, choose_deployment, expert_formats
from .fit import Plan, parameters, plan
from .models import NAMES, Model, Preset, released

__all__ = [
    "FP4",
    "NAMES",
    "Deployment",
    "Limits",
    "Model",
    "Plan",
    "Preset",
    "choose_deployment",
    "expert_formats",
    "parameters",
    "plan",
    "released",
]
