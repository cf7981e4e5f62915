"""What the driver relies on of modelopt's hf_ptq.py, as small as can be."""

import argparse

import modelopt.torch.quantization as mtq
import sibling
import torch
import transformers


def parse_args():
    parser = argparse.ArgumentParser()
    for name in ("pyt_ckpt_path", "export_path", "qformat", "kv_cache_qformat", "dataset"):
        parser.add_argument("--" + name)
    for name in ("calib_seq", "batch_size"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--calib_size", default="1024")
    parser.add_argument("--gpu_max_mem_percentage", type=float)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipe")
    parser.add_argument("--sparsity_fmt", default="dense")
    for name in ("skip_generate", "low_memory_mode", "trust_remote_code", "use_seq_device_map"):
        parser.add_argument("--" + name, action="store_true")
    return parser.parse_args()


def load_model(args):
    model = transformers.AutoModelForCausalLM.from_pretrained(args.pyt_ckpt_path, dtype="auto")
    return model, model


def export_quantized(
    args,
    full_model,
    language_model,
    model_type,
    tokenizer,
    default_padding_side,
    default_pad_token,
):
    with open(args.export_path, "w") as file:
        file.write("exported")


def post_quantize(args, model):
    if not args.skip_generate:
        raise RuntimeError("generates")
    export_quantized(args, model, model, None, None, None, None)


def main(args):
    assert isinstance(args.calib_size, list)
    assert isinstance(args.dataset, list)
    model, _ = load_model(args)

    def loop(module):
        for batch in sibling.batches(args):
            module(input_ids=torch.tensor([batch]))

    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, loop)
    post_quantize(args, model)


if __name__ == "__main__":
    args = parse_args()

    args.dataset = args.dataset.split(",") if isinstance(args.dataset, str) else args.dataset
    args.calib_size = [int(size) for size in args.calib_size.split(",")]

    main(args)
