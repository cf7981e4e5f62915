"""vLLM's NVFP4 experts, with block scales that every kernel can read.

Marlin keeps a block scale without its leading exponent bit: whatever is below 2^-6, E4M3's
subnormals, becomes zero (vLLM 0.33.0: quantization/utils/marlin_utils_fp4.py,
``nvfp4_marlin_process_scales``). It scales a layer's experts up first, but all by one factor. The
exact cast from MXFP4 uses subnormals, so each expert is scaled up by itself here.
"""

from __future__ import annotations

from typing import Final

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE

from .errors import LoadError
from .small_scales import NORMAL, lift

_NO_SUBNORMALS: Final = (NvFp4MoeBackend.MARLIN,)


class ModelOptNVFP4Experts(ModelOptNvFp4FusedMoE):
    """Lifts small block scales where the kernel would lose them.

    vLLM's loader of experts looks for "ModelOpt" in this name.
    """

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """As vLLM's; raises LoadError if a kernel would read block scales as zero nevertheless."""
        if self.nvfp4_backend in _NO_SUBNORMALS:
            lost = lift(layer.w13_weight_scale.data, layer.w13_weight_scale_2.data)
            lost += lift(layer.w2_weight_scale.data, layer.w2_weight_scale_2.data)
            if lost:
                raise LoadError(
                    f"{layer.layer_name}: {lost} block scales of its experts are below "
                    f"2^{NORMAL} beside others near 448, and the kernel "
                    f"{self.nvfp4_backend.value} reads them as zero. Serve with --moe-backend "
                    "humming."
                )
        super().process_weights_after_loading(layer)
