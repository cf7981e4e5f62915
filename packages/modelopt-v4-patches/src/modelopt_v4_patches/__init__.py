"""Takes DeepSeek-V4 to NVFP4 with nvidia-modelopt. Not implemented yet."""

from importlib.metadata import version

__version__ = version("modelopt-v4-patches")
