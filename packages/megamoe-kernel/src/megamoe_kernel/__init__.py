"""Fused expert-parallel mixture-of-experts kernels for NVFP4 weights. Not implemented yet."""

from importlib.metadata import version

__version__ = version("megamoe-kernel")
