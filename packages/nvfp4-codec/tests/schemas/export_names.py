"""Writes the lists data/tiny.*.txt: names that a real modelopt export of the tiny model has.

Run it with the torch, transformers and modelopt versions to be recorded (on the CPU):

    python export_names.py NVFP4_DEFAULT_CFG [--kv-cache] data/tiny.hf-5.14.txt

The MTP tensors take the way that modelopt's hf_ptq example gives them: read from the official
checkpoint, handed to the exporter as ``extra_state_dict``.
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path

import modelopt
import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_hf_checkpoint
from safetensors import safe_open
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

DATA = Path(__file__).with_name("data")


def keep_dtype_in_norms() -> None:
    """transformers 5.10 to 5.18 return float32 from a norm of bfloat16 input."""
    for name in ("DeepseekV4RMSNorm", "DeepseekV4UnweightedRMSNorm"):
        norm = getattr(modeling, name, None)
        if norm is not None:
            forward = norm.forward
            norm.forward = lambda self, x, forward=forward: forward(self, x).to(x.dtype)


def mtp_tensors(config: dict[str, object]) -> dict[str, torch.Tensor]:
    names = []
    for line in (DATA / "flash.tensors.txt").read_text().splitlines():
        name = line.split()[0]
        if name.startswith("mtp.#."):
            name = name.replace("mtp.#", "mtp.0")
            names += [name.replace("#", str(e)) for e in range(config["n_routed_experts"])]
    return {name: torch.zeros(1) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", choices=["NVFP4_DEFAULT_CFG", "NVFP4_EXPERTS_ONLY_CFG"])
    parser.add_argument("--kv-cache", action="store_true")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()

    keep_dtype_in_norms()
    official = json.loads((DATA / "tiny.config.json").read_text())
    kept = {k: v for k, v in official.items() if k not in ("quantization_config", "expert_dtype")}
    config = transformers.DeepseekV4Config(
        **{**kept, "compress_ratios": kept["compress_ratios"][: kept["num_hidden_layers"]]},
        architectures=["DeepseekV4ForCausalLM"],
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config).to(torch.bfloat16).eval()
    for name, buffer in model.named_buffers():
        if "tid2eid" in name:
            buffer.copy_(torch.randint(0, config.n_routed_experts, buffer.shape))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)

    quantization = copy.deepcopy(getattr(mtq, args.config))
    if args.kv_cache:
        from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant

        quantization = update_quant_cfg_with_kv_cache_quant(
            quantization, copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        )
    ids = torch.randint(0, config.vocab_size, (2, 256))
    model = mtq.quantize(model, quantization, lambda m: m(ids, use_cache=False))
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        export_hf_checkpoint(
            model,
            dtype=torch.bfloat16,
            export_dir=folder,
            extra_state_dict=mtp_tensors(official),
        )
        names: list[str] = []
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, "pt") as checkpoint:
                names += checkpoint.keys()
        exported = json.loads((Path(folder) / "config.json").read_text())
    versions = f"modelopt {modelopt.__version__}, transformers {transformers.__version__}"
    options = args.config + (" with FP8 KV cache" if args.kv_cache else "")
    header = [
        f"# Export of the tiny model by {versions}: {options}.",
        f"# ignore: {json.dumps(exported['quantization_config']['ignore'])}",
    ]
    args.output.write_text("\n".join([*header, *sorted(names)]) + "\n")


if __name__ == "__main__":
    main()
