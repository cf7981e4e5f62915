"""The two formats of four bits a value, told apart by dtype and by scale."""

from __future__ import annotations

import pytest
import torch

from nvfp4_codec.errors import CheckpointError
from vllm_dsv4.options import Options
from vllm_dsv4.stored import read_stored
from vllm_dsv4.transform import Transform


def test_mxfp4_experts_leave_with_their_scale(checkpoints, oracle):
    """As in a checkpoint whose MTP experts were copied from the official one."""
    source = checkpoints.read(checkpoints.TINY)
    out = dict(Transform(read_stored(checkpoints.TINY), Options()).apply(source.items()))
    scales = [n for n in source if ".ffn.experts." in n and n.endswith(".scale")]
    assert len(scales) == 5 * 16 * 3
    for name in scales:
        weight = name.replace(".scale", ".weight")
        assert oracle.same(out[name], source[name])
        assert oracle.same(out[weight], source[weight])


def test_an_expert_without_its_scale_is_lacking_one(checkpoints):
    stored, source = read_stored(checkpoints.TINY), checkpoints.read(checkpoints.TINY)
    name = "layers.1.ffn.experts.3.w2.scale"
    del source[name]
    with pytest.raises(CheckpointError, match=f"ended before 1 tensors came: {name}"):
        list(Transform(stored, Options()).apply(source.items()))


@pytest.mark.parametrize("module", ["layers.1.attn.wq_b", "layers.1.ffn.experts.3.w2"])
def test_signed_bytes_are_no_nvfp4_codes(run, module):
    """MXFP4's dtype under NVFP4's scales: which of the two the codes are is not known."""
    whole = run("full")
    name = f"{module}.weight"
    source = {**whole.source, name: whole.source[name].view(torch.int8)}
    message = f"{name}.*is torch.int8, expected torch.uint8: .*stored as nvfp4"
    with pytest.raises(CheckpointError, match=message):
        list(Transform(whole.stored, Options()).apply(source.items()))
