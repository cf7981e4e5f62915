"""One load_weights call: the transform, what the model does not take, the report, the checks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe import DeepGemmMegaMoEExperts

from nvfp4_codec.checkpoint.header import some_names

from .errors import LoadError
from .kernel_experts import KernelExperts
from .transform import Part, Transform
from .verify import Verifier

if TYPE_CHECKING:
    from .options import Options
    from .quant_config import DSV4NVFP4Config

Named = tuple[str, Tensor]

_LAYER: Final = re.compile(r"(?:model\.)?layers\.([0-9]+)\.")
#: MegaMoE quantizes the tokens it dispatches with scales of their own.
_UNUSED_BY_MEGA_MOE: Final = re.compile(r"\.ffn\.experts\.[0-9]+\.w[13]\.input_scale$")
#: The draft takes them from the model it drafts for, unless the checkpoint has its own.
_SHARED_BY_MTP: Final = (".shared_head.head.weight", "model.embed_tokens.weight")

_log = logging.getLogger(__name__)


class Loading:
    """What stands between a checkpoint's tensors and vLLM's own load_weights.

    is_first: later calls may bring new values for some parameters only. layers: of this pipeline
    stage; None is all.
    """

    def __init__(
        self,
        model: nn.Module,
        quant_config: DSV4NVFP4Config,
        options: Options,
        *,
        is_first: bool,
        part: Part,
        shared_tp: int,
        layers: range | None = None,
    ) -> None:
        self._model = model
        self._layers = layers
        self._part = part
        self._is_first = is_first
        self._transform = Transform(quant_config.stored, options, part=part, shared_tp=shared_tp)
        self._verifier = Verifier(model, quant_config) if options.verify_load else None
        self._is_mega_moe = any(
            isinstance(module, DeepGemmMegaMoEExperts) for module in model.modules()
        )

    def stream(self, weights: Iterable[Named]) -> Iterator[Named]:
        """The tensors as vLLM's loader takes them, one by one; to be exhausted once."""
        weights = self._of_this_stage(weights)
        if self._verifier is None:
            yield from self._wanted(self._transform.apply(weights))
        else:
            stored = self._verifier.source(weights)
            yield from self._verifier.loaded(self._wanted(self._transform.apply(stored)))

    def finish(self, loaded: set[str]) -> None:
        """Hands kernels their weights and logs what was loaded.

        Raises LoadError if a parameter of the model was never written.
        """
        if self._is_first:
            self._check_complete(loaded)
        if self._verifier is not None:
            self._verifier.finish()
            _log.info("verified: %d linears hold what is stored", len(self._verifier.verified))
            if rest := self._verifier.unverified:
                _log.warning("not verified: %d linears, %s", len(rest), some_names(rest))
        for module in self._model.modules():
            if isinstance(module, KernelExperts):
                module.prepare()
            if isinstance(getattr(module, "experts", None), KernelExperts):
                # Else vLLM warms DeepGEMM up with it, wherever DeepGEMM is installed.
                vars(module)["use_native_mega_moe"] = False
        if get_tensor_model_parallel_rank() == 0:  # the others did the same
            _log.info("loaded:\n%s", self._transform.report.table())

    def _check_complete(self, loaded: set[str]) -> None:
        missing = [
            name
            for name, _ in self._model.named_parameters()
            if name not in loaded and not (self._part == "mtp" and name.endswith(_SHARED_BY_MTP))
        ]
        if missing:
            raise LoadError(
                f"{len(missing)} parameters were not in the checkpoint: {some_names(missing)} "
                "(vLLM's names). Run 'vllm-dsv4 doctor' on it."
            )

    def _wanted(self, stream: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in stream:
            if not (self._is_mega_moe and _UNUSED_BY_MEGA_MOE.search(name)):
                yield name, tensor

    def _of_this_stage(self, weights: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in weights:
            found = _LAYER.match(name)
            if self._layers is None or found is None or int(found[1]) in self._layers:
                yield name, tensor
