"""A vLLM plugin that serves full-NVFP4 DeepSeek-V4 checkpoints."""

from importlib.metadata import version

__version__ = version("vllm-dsv4")
