"""Writes the same function with sizes that blocks of 128 divide, for models of the family llama such as SmolLM2.

python examples/smollm2/lm_eval/pad.py build/smollm2 build/smollm2_padded

Rows, columns and heads of zeros are added: hidden 576 becomes 768 and the heads 9 and 3 become 12 and 4, which keeps
their ratio. RMSNorm takes its mean over more elements, so its weights shrink by the root of the ratio, and eps by it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128


def pad(weight: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return a weight with zeros after its rows and columns, in these sizes."""
    padded = weight.new_zeros(sizes)
    padded[tuple(slice(size) for size in weight.shape)] = weight
    return padded


def new_config(config: dict) -> dict:
    """Return the configuration of the padded model: the next number of key heads for which all sizes are multiples."""
    heads, groups = config["num_attention_heads"], config["num_attention_heads"] // config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    if config["intermediate_size"] % BLOCK:
        raise SystemExit(
            f"intermediate_size {config['intermediate_size']} is no multiple of {BLOCK}: not supported here"
        )
    kv = config["num_key_value_heads"]
    while kv * head % BLOCK or kv * groups * head < config["hidden_size"] or kv * groups * head % BLOCK:
        kv += 1
    hidden, ratio = kv * groups * head, config["hidden_size"] / (kv * groups * head)
    sizes = {"hidden_size": hidden, "num_attention_heads": kv * groups, "num_key_value_heads": kv, "head_dim": head}
    return config | sizes | {"rms_norm_eps": config["rms_norm_eps"] * ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    for name in ("config.json", "model.safetensors"):
        if not (args.folder / name).is_file():
            raise SystemExit(f"{args.folder} has no {name}: name the folder of a model with one file of weights")
    if os.path.lexists(args.out):
        raise SystemExit(f"{args.out} exists: delete it, or name another folder")
    before = json.loads((args.folder / "config.json").read_text())
    after = new_config(before)
    hidden, head, inner = after["hidden_size"], after["head_dim"], before["intermediate_size"]
    queries, keys = after["num_attention_heads"] * head, after["num_key_value_heads"] * head
    shapes = {
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
        "embed_tokens": (before["vocab_size"], hidden), "lm_head": (before["vocab_size"], hidden),
    }  # fmt: skip
    weights = {}
    for name, weight in load_file(args.folder / "model.safetensors").items():
        if name.endswith("norm.weight"):
            shrunk = (weight.float() * math.sqrt(before["hidden_size"] / hidden)).to(weight.dtype)
            weights[name] = pad(shrunk, hidden)
        else:
            weights[name] = pad(weight, *shapes[name.split(".")[-2]])
    args.out.mkdir(parents=True)
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "config.json").write_text(json.dumps(after, indent=2) + "\n")
    for file in args.folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, args.out)
    print(f"{args.out}: hidden {before['hidden_size']} to {hidden}")


if __name__ == "__main__":
    main()
