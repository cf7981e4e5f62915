"""The streaming pass between a checkpoint's tensors and the model: names, formats, fused scales.

``stream`` is the pass, ``values`` converts one linear, ``fused`` gives a fused pair one scale,
``padding`` widens shared experts for tensor parallelism, ``report`` tells what was done.
"""

from .report import TransformReport
from .stream import Part, Transform

__all__ = ["Part", "Transform", "TransformReport"]
