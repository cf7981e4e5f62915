"""What serving a model takes on given GPUs, and whether it fits: arithmetic, without a GPU.

`plan` adds up `weights`, `buffers` and `kv_cache` for the fullest GPU of a `Deployment`. Every
formula names its source in vLLM 0.33.0; where vLLM measures instead, ours is an estimate.
"""

from .buffers import Limits
from .deployment import Deployment, choose_deployment
from .fit import Plan, plan
from .models import NAMES, Model, Preset, released

__all__ = [
    "NAMES",
    "Deployment",
    "Limits",
    "Model",
    "Plan",
    "Preset",
    "choose_deployment",
    "plan",
    "released",
]
