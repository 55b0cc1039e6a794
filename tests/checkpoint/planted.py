"""Good folders of every format, written with safetensors alone, and the corruptions that are planted in them.

`write(form, folder, place)` makes a good one; each entry of `CORRUPTIONS` is a function folder -> None that damages it
in one way, with the forms it can be planted in, the kind that `octavo verify` finds, and whether it needs a reference.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from octavo.models import tiny
from octavo.models.tiny_configs import tiny_config

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
        edit_json(folder / "config.json", lambda raw: raw.update(image_token_id=theirs["image_token_id"]))
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


# -- the corruptions ---------------------------------------------------------------------------------------------------


def dropped_scale(folder: Path) -> None:
    put(folder, scale_name(folder), None)


def transposed_scale(folder: Path) -> None:
    rescale(folder, lambda s: s.T, GATE)


def transposed_square_scale(folder: Path) -> None:
    rescale(folder, lambda s: s.T)


def scale_of_another_block(folder: Path) -> None:
    rescale(folder, lambda s: s.repeat_interleave(2, 0).repeat_interleave(2, 1))


def unscaled_cast(folder: Path) -> None:
    """The weight's values cast as they are, the scales left at 1."""
    name = scale_name(folder)
    put(folder, Q, values_on_disk(folder, Q).to(torch.float8_e4m3fn))
    put(folder, name, torch.ones_like(get(folder, name)))


def scales_of_one(folder: Path) -> None:
    rescale(folder, torch.ones_like)


def codes_cast_to_bf16(folder: Path) -> None:
    """What `.to(torch.bfloat16)` makes of an FP8 weight: codes as values, the scale gone."""
    put(folder, Q, get(folder, Q).to(torch.bfloat16))
    put(folder, scale_name(folder), None)
    skip_list(folder, lambda names: names.append(Q.removesuffix(".weight")))


def codes_cast_to_bf16_scale_left(folder: Path) -> None:
    put(folder, Q, get(folder, Q).to(torch.bfloat16))


def reciprocal_scale(folder: Path) -> None:
    rescale(folder, lambda s: 1 / s)


def squared_scale(folder: Path) -> None:
    rescale(folder, lambda s: s * s)


def zero_scale(folder: Path) -> None:
    def change(s: Tensor) -> Tensor:
        s.view(-1)[0] = 0
        return s

    rescale(folder, change)


def zero_block(folder: Path) -> None:
    """A block of zeros quantized with amax / 448 and no floor: scale 0."""
    codes = get(folder, Q).view(torch.uint8).clone()
    codes[:BLOCK] = 0
    put(folder, Q, codes.view(torch.float8_e4m3fn))

    def change(s: Tensor) -> Tensor:
        s[: BLOCK if s.shape[0] > BLOCK else 1] = 0
        return s

    rescale(folder, change)


def nan_scale(folder: Path) -> None:
    def change(s: Tensor) -> Tensor:
        s.view(-1)[-1] = float("nan")
        return s

    rescale(folder, change)


def negative_scale(folder: Path) -> None:
    rescale(folder, lambda s: -s)


def nan_block(folder: Path) -> None:
    codes = get(folder, Q).view(torch.uint8).clone()
    codes[:BLOCK, :BLOCK] = 0x7F
    put(folder, Q, codes.view(torch.float8_e4m3fn))


def nan_value(folder: Path) -> None:
    norm = get(folder, "model.norm.weight")
    norm[3] = float("inf")
    put(folder, "model.norm.weight", norm)


def scale_of_the_other_method(folder: Path) -> None:
    name = scale_name(folder)
    other = name.removesuffix("_inv") if name.endswith("_inv") else f"{name}_inv"
    scale = get(folder, name)
    put(folder, other, scale, beside=name)
    put(folder, name, None)


def scale_under_both_names(folder: Path) -> None:
    name = scale_name(folder)
    other = name.removesuffix("_inv") if name.endswith("_inv") else f"{name}_inv"
    put(folder, other, get(folder, name), beside=name)


def scale_in_f16(folder: Path) -> None:
    rescale(folder, lambda s: s.half())


def scale_in_e8m0_untold(folder: Path) -> None:
    rescale(folder, lambda s: s.to(torch.float8_e8m0fnu))


def skip_list_covers_fp8(folder: Path) -> None:
    skip_list(folder, lambda names: names.append(Q.removesuffix(".weight")))


def skip_list_covers_by_its_end(folder: Path) -> None:
    """A trap: transformers takes an entry also as the end of a name."""
    skip_list(folder, lambda names: names.append("q_proj"))


def skip_list_lacks_head(folder: Path) -> None:
    skip_list(folder, lambda names: names.remove("lm_head"))


def skip_list_lacks_bf16_layer(folder: Path) -> None:
    """A layer left in BF16 without being listed: transformers does so silently where a shape does not fit."""
    dequantize(folder, DOWN)


def skip_list_by_fragment(folder: Path) -> None:
    """The same, listed by a fragment: transformers and SGLang take it, vLLM's exact rule does not."""
    skip_list_lacks_bf16_layer(folder)
    skip_list(folder, lambda names: names.append("layers.1.mlp.down_proj"))


def skip_list_names_nothing(folder: Path) -> None:
    skip_list(folder, lambda names: names.append("model.layers.7.mlp.down_proj"))


def quantization_config_lost(folder: Path) -> None:
    """What transformers 5.23's save_pretrained leaves of an FP8 checkpoint that it loaded on a CPU."""
    edit_json(folder / "config.json", lambda raw: raw.pop("quantization_config"))


def scales_and_config_lost(folder: Path) -> None:
    quantization_config_lost(folder)
    for file in folder.glob("*.safetensors"):
        for name in list(read(file)):
            if "_scale" in name:
                put(folder, name, None)


def per_tensor_under_fp8(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw["quantization_config"].update(weight_block_size=None))


def config_without_codes(folder: Path) -> None:
    block = block_of("fp8-block", ["lm_head"])
    edit_json(folder / "config.json", lambda raw: raw.update(quantization_config=block))


def head_quantized(folder: Path) -> None:
    form = "fp8-block" if scale_name(folder).endswith("_inv") else "ct-row"
    codes, scale = cast(get(folder, "lm_head.weight"), form)
    put(folder, "lm_head.weight", codes)
    put(folder, "lm_head.weight" + scale_name(folder).removeprefix(Q), scale, beside="lm_head.weight")


def embedding_quantized(folder: Path) -> None:
    name = "model.embed_tokens.weight"
    codes, scale = cast(get(folder, name), "fp8-block" if scale_name(folder).endswith("_inv") else "ct-row")
    put(folder, name, codes)
    put(folder, name + scale_name(folder).removeprefix(Q), scale, beside=name)


def router_quantized(folder: Path) -> None:
    name = "model.layers.0.mlp.gate.weight"
    codes, scale = cast(get(folder, name), "fp8-block")
    put(folder, name, codes)
    put(folder, name + "_scale_inv", scale, beside=name)


def unequal_scales(folder: Path) -> None:
    """A scale of its own for q_proj, as a cast layer by layer gives it."""
    name = scale_name(folder)
    values = get(folder, Q).float() * get(folder, name) / 2
    codes, scale = cast(values, "ct-tensor")
    put(folder, Q, codes)
    put(folder, name, scale)


def half_a_fused_matrix(folder: Path) -> None:
    dequantize(folder, GATE)
    skip_list(folder, lambda names: names.append(GATE.removesuffix(".weight")))


def truncated_shard(folder: Path) -> None:
    file = shard_of(folder, Q)
    file.write_bytes(file.read_bytes()[:-1000])


def truncated_header(folder: Path) -> None:
    file = shard_of(folder, Q)
    file.write_bytes(file.read_bytes()[:100])


def damaged_header(folder: Path) -> None:
    file = shard_of(folder, Q)
    raw = bytearray(file.read_bytes())
    raw[8:12] = b"oops"
    file.write_bytes(bytes(raw))


def missing_shard(folder: Path) -> None:
    shard_of(folder, Q).unlink()


def missing_index_entry(folder: Path) -> None:
    edit_json(folder / INDEX, lambda raw: raw["weight_map"].pop(Q))


def index_entry_without_tensor(folder: Path) -> None:
    file = shard_of(folder, Q)
    tensors = read(file)
    del tensors[Q]
    save_file(tensors, file, {"format": "pt"})


def extra_shard(folder: Path) -> None:
    save_file({"model.stray": torch.zeros(2)}, folder / "model-00003-of-00002.safetensors")


def single_file_beside_shards(folder: Path) -> None:
    save(folder, {n: t for f in folder.glob("model-*.safetensors") for n, t in read(f).items()}, shards=1)


def shard_beside_single_file(folder: Path) -> None:
    single_file_beside_shards(folder)
    (folder / INDEX).unlink()


def duplicated_tensor(folder: Path) -> None:
    other = next(f for f in sorted(folder.glob("model-*.safetensors")) if f != shard_of(folder, Q))
    tensors = read(other)
    tensors[Q] = get(folder, Q)
    save_file(tensors, other, {"format": "pt"})


def pickle_for_safetensors(folder: Path) -> None:
    file = shard_of(folder, Q)
    torch.save(read(file), file)


def plain_pickle_for_safetensors(folder: Path) -> None:
    shard_of(folder, Q).write_bytes(pickle.dumps({"a": 1}))


def only_pickles(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")


def missing_tensor(folder: Path) -> None:
    put(folder, "model.norm.weight", None)


def extra_tensor(folder: Path) -> None:
    put(folder, "model.layers.0.mlp.extra.weight", torch.zeros(4, 4), beside=Q)


def wrong_shape(folder: Path) -> None:
    put(folder, "model.norm.weight", torch.ones(8))


def wrong_dtype(folder: Path) -> None:
    put(folder, "model.norm.weight", torch.ones(256, dtype=torch.int32))


def e5m2_codes(folder: Path) -> None:
    put(folder, Q, get(folder, Q).float().to(torch.float8_e5m2))


def another_config(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update(num_hidden_layers=3, layer_types=["full_attention"] * 3))


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def untied_head(folder: Path) -> None:
    """config.json ties lm_head to the embeddings, and another lm_head is on disk."""
    put(folder, "lm_head.weight", torch.randn(512, 256).to(torch.bfloat16), beside="model.norm.weight")


def no_architectures(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw.pop("architectures"))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def repeated_head(folder: Path) -> None:
    """The tied head on disk once more, the same bytes."""
    put(folder, "lm_head.weight", get(folder, "model.embed_tokens.weight"), beside="model.norm.weight")


@dataclass(frozen=True)
class Corruption:
    """plant: what damages; kind: what verify finds; forms it is planted in; fails: or only warns; against: needs it;
    model: of `write`; load: whether it concerns who loads the folder, so that models.load must refuse it too."""

    plant: Callable[[Path], None]
    kind: str
    forms: tuple[str, ...] = ("plain", "fp8-block")
    fails: bool = True
    against: bool = False
    model: str = "qwen3"
    load: bool = True


_BLOCKS = ("fp8-block", "ct-block")
_GRIDS = ("fp8-block", "ct-row", "ct-block")

CORRUPTIONS = (
    Corruption(dropped_scale, "scale-missing", QUANTIZED),
    Corruption(transposed_scale, "scale-transposed", ("fp8-block", "ct-block", "ct-row")),
    Corruption(transposed_square_scale, "error", _BLOCKS, against=True, load=False),
    Corruption(scale_of_another_block, "scale-grid", _BLOCKS),
    Corruption(unscaled_cast, "unscaled", QUANTIZED),
    Corruption(scales_of_one, "unscaled", QUANTIZED),
    Corruption(codes_cast_to_bf16, "codes-as-values", QUANTIZED, load=False),
    Corruption(codes_cast_to_bf16_scale_left, "scale-dangling", QUANTIZED),
    Corruption(reciprocal_scale, "reciprocal", QUANTIZED, load=False),
    Corruption(reciprocal_scale, "error", QUANTIZED, against=True, load=False),
    Corruption(squared_scale, "double-scaled", QUANTIZED, load=False),
    Corruption(squared_scale, "error", QUANTIZED, against=True, load=False),
    Corruption(zero_scale, "scale-zero", QUANTIZED),
    Corruption(zero_block, "scale-zero", _GRIDS),
    Corruption(nan_scale, "scale-nan", QUANTIZED),
    Corruption(negative_scale, "scale-negative", QUANTIZED),
    Corruption(nan_block, "nan-codes", QUANTIZED),
    Corruption(nan_value, "nan-values", load=False),
    Corruption(scale_of_the_other_method, "scale-name", QUANTIZED),
    Corruption(scale_under_both_names, "scale-both", QUANTIZED),
    Corruption(scale_in_f16, "scale-dtype", QUANTIZED, load=False),
    Corruption(scale_in_e8m0_untold, "scale-dtype", QUANTIZED, load=False),
    Corruption(skip_list_covers_fp8, "skip-covers-fp8", QUANTIZED),
    Corruption(skip_list_covers_by_its_end, "skip-covers-fp8", ("fp8-block",)),
    Corruption(skip_list_lacks_head, "skip-missing", QUANTIZED, load=False),
    Corruption(skip_list_lacks_bf16_layer, "skip-missing", QUANTIZED),
    Corruption(skip_list_by_fragment, "skip-missing", QUANTIZED, load=False),
    Corruption(skip_list_names_nothing, "skip-nothing", QUANTIZED, fails=False, load=False),
    Corruption(quantization_config_lost, "quantization-lost", QUANTIZED),
    Corruption(scales_and_config_lost, "quantization-lost", QUANTIZED),
    Corruption(per_tensor_under_fp8, "fp8-tensor", ("fp8-block",)),
    Corruption(config_without_codes, "quantization-without-codes", ("plain",)),
    Corruption(head_quantized, "skip-covers-fp8", ("fp8-block", "ct-row")),
    Corruption(embedding_quantized, "fp8-elsewhere", ("fp8-block", "ct-row")),
    Corruption(router_quantized, "router", ("fp8-block",), model="qwen3_moe"),
    Corruption(unequal_scales, "scale-unshared", ("ct-tensor",), fails=False, load=False),
    Corruption(half_a_fused_matrix, "fused-mixed", QUANTIZED, load=False),
    Corruption(truncated_shard, "truncated"),
    Corruption(truncated_header, "truncated"),
    Corruption(damaged_header, "header"),
    Corruption(missing_shard, "missing-shard"),
    Corruption(missing_index_entry, "index-entry"),
    Corruption(index_entry_without_tensor, "index-tensor"),
    Corruption(extra_shard, "extra-shard", fails=False, load=False),
    Corruption(single_file_beside_shards, "two-layouts", ("plain",), fails=False, load=False),
    Corruption(shard_beside_single_file, "extra-shard", ("plain",), load=False),
    Corruption(duplicated_tensor, "duplicate", load=False),
    Corruption(pickle_for_safetensors, "pickle"),
    Corruption(plain_pickle_for_safetensors, "pickle"),
    Corruption(only_pickles, "only-pickles"),
    Corruption(missing_tensor, "missing"),
    Corruption(extra_tensor, "extra"),
    Corruption(wrong_shape, "shape"),
    Corruption(wrong_dtype, "dtype", load=False),
    Corruption(e5m2_codes, "e5m2", QUANTIZED),
    Corruption(another_config, "missing"),
    Corruption(broken_config, "config"),
    Corruption(untied_head, "tied", ("plain", "fp8-block"), model="qwen3_tied", load=False),
    Corruption(repeated_head, "tied-twice", ("plain",), fails=False, model="qwen3_tied", load=False),
    Corruption(no_architectures, "architectures", ("plain",), load=False),
    Corruption(no_tokenizer, "companion", ("plain",), load=False),
)


def tokenizers(folder: Path) -> Path:
    """A tiny checkpoint whose tokenizer files good folders borrow (`folder` is new)."""
    return tiny.write("qwen3_vl", folder, size="mini")
