"""vLLM's real model classes, built and loaded on a machine without a GPU, through the plugin.

`Harness` starts the process; ``harness.call("vllm_dsv4.testing.harness", "load", folder=...)``
builds a model in it and loads a checkpoint. Nothing can be run: the kernels need a GPU.
"""

from .loaded import LoadedModel
from .platform import StandInError, environment
from .server import Harness, RemoteError

__all__ = ["Harness", "LoadedModel", "RemoteError", "StandInError", "environment"]
