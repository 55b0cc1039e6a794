"""The corruptions that are planted in good folders.

Each entry of `CORRUPTIONS` is a function folder -> None that damages one in one way, with the forms it can be planted
in, the kind that `octavo verify` finds, and whether it needs a reference.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoint.folders import (
    BLOCK,
    DOWN,
    GATE,
    INDEX,
    QUANTIZED,
    Q,
    block_of,
    cast,
    dequantize,
    edit_json,
    get,
    put,
    read,
    rescale,
    save,
    scale_name,
    shard_of,
    skip_list,
    values_on_disk,
)


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
    Corruption(no_architectures, "no-architectures", ("plain",), load=False),
    Corruption(no_tokenizer, "companion", ("plain",), load=False),
)
