"""Good folders of every format, written with safetensors alone, and hands to change what lies in them.

`write(form, folder, place)` makes one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from octavo.models.tiny import tiny
from octavo.models.tiny.configs import tiny_config

FORMS = ("plain", "fp8-block", "ct-row", "ct-tensor", "ct-block")
Good = Callable[..., Path]  # (form, model) -> a good folder; read only
QUANTIZED = FORMS[1:]
BLOCK = 128
INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
_DIMS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "dtype": torch.bfloat16,
}


def config_of(model: str) -> Any:
    """qwen3 (untied), qwen3_tied, qwen3_moe or qwen3_vl (mini widths grown to whole blocks)."""
    if model == "qwen3_moe":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        return Qwen3MoeConfig(**_DIMS, **more, tie_word_embeddings=False)
    if model == "qwen3_vl":
        config = tiny_config("qwen3_vl", "mini")
        config.text_config = type(config.text_config)(**{**config.text_config.to_dict(), **_DIMS})
        config.text_config.rope_parameters = {**config.text_config.rope_parameters, "mrope_section": [12, 10, 10]}
        config.vision_config.out_hidden_size = _DIMS["hidden_size"]
        config.dtype = torch.bfloat16
        return config
    return Qwen3Config(**_DIMS, tie_word_embeddings=model == "qwen3_tied")


def values_of(model: str, seed: int = 0) -> dict[str, Tensor]:
    """Random BF16 weights by their names on disk; matrices differ in size from block to block."""
    config = config_of(model)
    auto = AutoModelForImageTextToText if model == "qwen3_vl" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = auto.from_config(config, dtype=torch.bfloat16)
        state = {n: t for n, t in made.state_dict().items() if n not in (made.all_tied_weights_keys or {})}
        values = dict(revert_weight_conversion(made, state))
        for name, value in values.items():
            if value.dim() == 2:
                n, k = value.shape
                size = torch.exp2(torch.randint(-3, 3, (-(-n // BLOCK), -(-k // BLOCK))).float() + torch.rand(1))
                wide = size.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
                values[name] = (value.float() * wide).to(torch.bfloat16)
            values[name] = values[name].contiguous().clone()
    return values


def is_linear(name: str) -> bool:
    """Whether a weight of these models is put into FP8 here: the language model's linear layers."""
    return name.endswith("_proj.weight") and ".visual." not in name


def linear_modules(values: Mapping[str, Tensor]) -> list[str]:
    """The linear layers that stay in high precision, by full name: what a skip list must hold."""
    others = [
        n.removesuffix(".weight")
        for n, t in values.items()
        if n.endswith(".weight") and t.dim() == 2 and not is_linear(n) and "embed" not in n
    ]
    return sorted({*others, "lm_head"})


def cast(value: Tensor, form: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes, scales as they lie on disk): amax / 448 of a block, a row or the tensor; `scale` given: that one."""
    x = value.float()
    if form == "ct-row":
        s = x.abs().amax(1, keepdim=True) / 448
        return (x / s).to(torch.float8_e4m3fn), s
    if form == "ct-tensor":
        s = (x.abs().amax() / 448).reshape(1) if scale is None else scale
        return (x / s).to(torch.float8_e4m3fn), s
    n, k = x.shape
    rows, cols = -(-n // BLOCK), -(-k // BLOCK)
    padded = torch.zeros(rows * BLOCK, cols * BLOCK)
    padded[:n, :k] = x
    s = padded.view(rows, BLOCK, cols, BLOCK).abs().amax((1, 3)) / 448
    wide = s.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return (x / wide).to(torch.float8_e4m3fn), s


def quantized(values: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """The folder's tensors in a form; layers that servers fuse share their scale where there is one a tensor."""
    out: dict[str, Tensor] = {}
    suffix = "_scale_inv" if form == "fp8-block" else "_scale"
    for name, value in values.items():
        if form == "plain" or not is_linear(name):
            out[name] = value
            continue
        scale = None
        if form == "ct-tensor":
            prefix = name.removesuffix(".weight").rpartition(".")[0]
            leaf = name.removesuffix(".weight").rpartition(".")[2]
            group = next((g for g in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if leaf in g), (leaf,))
            peak = max(float(values[f"{prefix}.{one}.weight"].float().abs().max()) for one in group)
            scale = torch.tensor([peak / 448])
        out[name], out[name + suffix] = cast(value, form, scale)
    return out


def block_of(form: str, skipped: list[str]) -> dict[str, Any] | None:
    """The quantization_config of a form."""
    if form == "plain":
        return None
    if form == "fp8-block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": skipped,
        }
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    weights["strategy"] = {"ct-row": "channel", "ct-tensor": "tensor", "ct-block": "block"}[form]
    inputs: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    if form == "ct-block":
        weights["block_structure"] = [BLOCK, BLOCK]
        inputs |= {"strategy": "group", "group_size": BLOCK}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": skipped,
        "config_groups": {"group_0": group},
    }


def write(form: str, folder: Path, tokenizer: Path, model: str = "qwen3", shards: int = 2, seed: int = 0) -> Path:
    """A good folder. `tokenizer`: a tiny checkpoint of the same kind, whose tokenizer files are copied."""
    folder.mkdir(parents=True)
    values = values_of(model, seed)
    tensors = quantized(values, form)
    config = config_of(model)
    config.architectures = [
        {"qwen3_moe": "Qwen3MoeForCausalLM", "qwen3_vl": "Qwen3VLForConditionalGeneration"}.get(
            model, "Qwen3ForCausalLM"
        )
    ]
    config.save_pretrained(folder)
    if block := block_of(form, linear_modules(values)):
        edit_json(folder / "config.json", lambda raw: raw.update(quantization_config=block))
    save(folder, tensors, shards)
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "preprocessor", "video_pre", "processor")):
            shutil.copy(file, folder / file.name)
    if model == "qwen3_vl":  # what belongs to the images is the tiny model's
        theirs = json.loads((tokenizer / "config.json").read_text())
        media = {key: theirs[key] for key in ("image_token_id", "video_token_id")}
        edit_json(folder / "config.json", lambda raw: raw.update(media))
    return folder


def save(folder: Path, tensors: Mapping[str, Tensor], shards: int = 2) -> None:
    """Write tensors in so many shards with their index, or as one file."""
    names = sorted(tensors)
    if shards == 1:
        save_file({n: tensors[n].contiguous() for n in names}, folder / "model.safetensors", {"format": "pt"})
        return
    placed = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[i::shards]
        save_file({n: tensors[n].contiguous() for n in mine}, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(mine, file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def read(file: Path) -> dict[str, Tensor]:
    """A shard's tensors, in memory: the file may be written over."""
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw, indent=2))


def shard_of(folder: Path, name: str) -> Path:
    if not (folder / INDEX).exists():
        return folder / "model.safetensors"
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def get(folder: Path, name: str) -> Tensor:
    return read(shard_of(folder, name))[name]


def put(folder: Path, name: str, tensor: Tensor | None, beside: str | None = None) -> None:
    """Replace, add (in the shard of `beside`) or with None remove a tensor, in its shard and in the index."""
    file = shard_of(folder, beside or name)
    tensors = read(file)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor.contiguous()
    save_file(tensors, file, {"format": "pt"})
    if (folder / INDEX).exists():

        def change(raw: dict[str, Any]) -> None:
            if tensor is None:
                del raw["weight_map"][name]
            else:
                raw["weight_map"][name] = file.name

        edit_json(folder / INDEX, change)


def scale_name(folder: Path, weight: str = Q) -> str:
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    return next(weight + s for s in ("_scale_inv", "_scale") if weight + s in placed)


def rescale(folder: Path, change: Callable[[Tensor], Tensor], weight: str = Q) -> None:
    name = scale_name(folder, weight)
    put(folder, name, change(get(folder, name)))


def values_on_disk(folder: Path, weight: str) -> Tensor:
    """code * scale of a weight, fp32."""
    codes, scale = get(folder, weight).float(), get(folder, scale_name(folder, weight)).float()
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes * scale[: codes.shape[0], : codes.shape[1]] if scale.dim() == 2 else codes * scale


def dequantize(folder: Path, weight: str) -> None:
    """A weight in BF16 instead of FP8, rightly."""
    values = values_on_disk(folder, weight).to(torch.bfloat16)
    put(folder, scale_name(folder, weight), None)
    put(folder, weight, values)


def skip_list(folder: Path, change: Callable[[list[str]], Any]) -> None:
    def edit(raw: dict[str, Any]) -> None:
        block = raw["quantization_config"]
        change(block["modules_to_not_convert" if "modules_to_not_convert" in block else "ignore"])

    edit_json(folder / "config.json", edit)


def tokenizers(folder: Path) -> Path:
    """A tiny checkpoint whose tokenizer files good folders borrow (`folder` is new)."""
    return tiny.write("qwen3_vl", folder, size="mini")
