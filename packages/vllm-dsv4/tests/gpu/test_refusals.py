"""What cannot run here says so, in vLLM's words or ours."""

from __future__ import annotations

import pytest

from .fleet import Served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.hopper,
    pytest.mark.filterwarnings("ignore"),  # transformers', as it finds its peers
]


@pytest.mark.parametrize("served", ["mega"], indirect=True)
def test_mega_moe_names_the_gpu_it_needs(served: Served) -> None:
    assert served.code != 0
    assert "DeepGEMM MegaMoE requires SM100 GPUs." in served.log


@pytest.mark.parametrize("served", ["stock"], indirect=True)
def test_vllm_without_the_plugin_refuses_a_full_checkpoint(served: Served) -> None:
    """It ends with an error of its loader; it never answers."""
    assert served.code != 0
    assert "Error" in served.log
    assert not served.arrays
