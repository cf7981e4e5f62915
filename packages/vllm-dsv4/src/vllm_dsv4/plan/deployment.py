"""How a model is divided over GPUs, and which division suits a kind of GPU."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from nvfp4_codec.schemas.deepseek_v4 import ModelConfig

from ..errors import PlanError
from ..gpus import Gpus
from ..stored import EXPERTS, Format, Stored
from .kv_cache import config_layers

#: Formats of experts that DeepGEMM's fused kernel runs; vLLM's MegaMoE layer loads no others.
FP4: Final[AbstractSet[Format]] = {"nvfp4", "mxfp4"}


@dataclass(frozen=True)
class Deployment:
    """vLLM's parallel sizes; expert parallelism spans tensor and data parallel ranks.

    mega_moe: experts run in DeepGEMM's fused kernel (--moe-backend deep_gemm_mega_moe).
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    mega_moe: bool = False

    @property
    def gpus(self) -> int:
        """GPUs that it occupies."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def experts_divided(self) -> int:
        """Over how many GPUs the routed experts are spread, whole or sliced.

        Source: vLLM 0.33.0, layers/fused_moe/config.py: without expert parallelism the experts'
        slices, too, span data parallel ranks.
        """
        return self.tensor_parallel * self.data_parallel

    @property
    def shared_replicated(self) -> bool:
        """Whether every GPU holds the whole shared expert, because tokens are divided instead.

        Source: vLLM 0.33.0, models/deepseek_v4/nvidia/model.py `_use_sequence_parallel`.
        """
        return self.tensor_parallel == 1 or (
            self.expert_parallel
            and self.pipeline_parallel == 1
            and (self.mega_moe or self.data_parallel > 1)
        )

    def layers(self, config: ModelConfig, stage: int) -> tuple[int, int]:
        """First and one past the last main layer of a pipeline stage.

        Source: vLLM 0.33.0, distributed/utils.py `get_pp_indices`: what is left over goes to the
        stages before the last, one each.
        """
        stages = self.pipeline_parallel
        even, left = divmod(config_layers(config), stages)
        sizes = [even + (stages - 1 - left <= i < stages - 1) for i in range(stages)]
        return sum(sizes[:stage]), sum(sizes[: stage + 1])

    def check(self, config: ModelConfig) -> None:
        """PlanError where vLLM's own divisions would not come out even."""
        dims = config.dimensions
        tp, ep = self.tensor_parallel, self.experts_divided
        if self.pipeline_parallel > (layers := config_layers(config)):
            raise PlanError(
                f"{layers} layers cannot be divided over {self.pipeline_parallel} pipeline stages; "
                "choose fewer nodes, or --pipeline-parallel-size."
            )
        for name, size, parts in (
            ("attention heads", dims["heads"], tp),
            ("output groups (o_groups)", dims["groups"], tp),
        ):
            if size % parts:
                raise PlanError(
                    f"{size} {name} cannot be divided over a tensor parallel size of {parts}; "
                    f"choose a divisor of {size}, and --data-parallel-size for the rest."
                )
        if self.expert_parallel and dims["experts"] % ep:
            raise PlanError(
                f"{dims['experts']} experts cannot be divided over {ep} GPUs; choose parallel "
                f"sizes whose product divides {dims['experts']}."
            )
        if self.mega_moe:
            self._check_mega_moe(config)

    def _check_mega_moe(self, config: ModelConfig) -> None:
        """Source: vLLM 0.33.0, layers/fused_moe/deep_gemm_mega_moe.py and its DeepGEMM."""
        if not self.expert_parallel:
            raise PlanError(
                "deep_gemm_mega_moe needs expert parallelism: add --enable-expert-parallel, or "
                "choose another --moe-backend."
            )
        for name in ("hidden", "inner"):
            if (size := config.dimensions[name]) % 128:
                raise PlanError(
                    f"deep_gemm_mega_moe wants multiples of 128; the {name} size is {size}. "
                    "Choose another --moe-backend."
                )


def expert_formats(stored: Stored, *, mtp: bool = False) -> set[Format]:
    """In which formats the routed experts are stored, with ``mtp`` those of MTP blocks too."""
    return {
        own
        for module, own in stored.formats.items()
        if module.endswith(EXPERTS) and (mtp or not module.startswith("mtp."))
    }


def choose_deployment(
    gpus: Gpus,
    stored: Stored,
    *,
    mtp: bool = False,
    tensor_parallel: int | None = None,
    pipeline_parallel: int | None = None,
    data_parallel: int | None = None,
    expert_parallel: bool | None = None,
    mega_moe: bool | None = None,
) -> Deployment:
    """What suits the GPUs, sizes that are given kept: tensor parallel in a node, pipeline across.

    Experts stay whole (expert parallelism) wherever there are two GPUs. On one node of Blackwell
    they run in the fused kernel: it spans one NVLink domain, and its experts have to be FP4, those
    of MTP blocks too if they draft (``mtp``). ``mega_moe`` decides that otherwise. GPUs that do not
    divide the model are left over.
    """
    dims = stored.schema.config.dimensions
    pipeline = pipeline_parallel or gpus.nodes
    data = data_parallel or 1
    tensor = tensor_parallel or max(
        (
            size
            for size in range(
                1, min(gpus.count, gpus.total // (pipeline * data), dims["heads"]) + 1
            )
            if not (dims["heads"] % size or dims["groups"] % size or dims["experts"] % size)
        ),
        default=1,
    )
    suits = (
        expert_parallel is not False
        and gpus.family == "blackwell"
        and gpus.nodes == pipeline == 1
        and stored.schema.config.expert_format == "mxfp4"  # of the model; NVFP4 is made from it
        and expert_formats(stored, mtp=mtp) <= FP4
        and not (dims["hidden"] % 128 or dims["inner"] % 128)
    )
    fused = suits if mega_moe is None else mega_moe
    if expert_parallel is None:
        expert_parallel = fused or tensor * data > 1
    return Deployment(tensor, pipeline, data, expert_parallel, fused)
