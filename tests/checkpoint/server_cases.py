"""What vLLM 0.32 did with folders that have one thing wrong (`server_folders` says how this was seen).

The folders of `WITHOUT_REFERENCE` were loaded, but their answers were not compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint.verify.servers.contents import LOADED_CLASSES
from tests.checkpoint.folders import block_of
from tests.checkpoint.server_folders import (
    DOWN,
    EMBED,
    GATE,
    HEAD,
    HIDDEN,
    INDEX,
    INNER,
    KV_SCHEME,
    LAST_NORM,
    LAYER,
    LAYERS,
    NORM,
    OK,
    REFUSES,
    SINGLE,
    UP,
    VOCABULARY,
    WRONG,
    Case,
    Change,
    Config,
    K,
    O,
    Q,
    V,
    add,
    both,
    drop,
    edit,
    edit_all,
    edit_index,
    group,
    in_bf16,
    in_fp8,
    listed,
    q,
    ragged,
    rewrite,
    settings,
    stray,
    unlink,
    zero_in_later_shard,
)

DOWN_SCALE, DOWN_INPUT = f"{DOWN}_scale", DOWN.replace("weight", "input_scale")
MLP = (GATE, UP, DOWN)


def _pad(rows: int, columns: int) -> object:
    def pad(tensor: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(
            tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int16), (0, columns, 0, rows)
        )
        return padded.view(tensor.dtype)

    return pad


def _kv(name: str) -> Change:
    """Scales of the KV cache of every layer."""
    return lambda w, _: w.update(
        {f"model.layers.{i}.self_attn.{name.format(k=k)}": torch.tensor([0.05]) for i in range(LAYERS) for k in "kv"}
    )


def _byte(value: int) -> Change:
    def change(weights: dict[str, torch.Tensor], _: object) -> None:
        codes = weights[DOWN].view(torch.uint8).clone()
        codes[0, 0] = value
        weights[DOWN] = codes.view(torch.float8_e4m3fn)

    return change


def _zero_copy(folder_file: str) -> object:
    return stray(DOWN, torch.zeros(HIDDEN, INNER, dtype=torch.bfloat16), folder_file)


def _fuse(name: str, *parts: str) -> Change:
    """One tensor under the name of the fused matrix instead of its parts; likewise scales of rows and blocks. Parts
    that share one scale keep it."""

    def change(weights: dict[str, torch.Tensor], _: object) -> None:
        parent = parts[0].rpartition(".")[0].rpartition(".")[0]
        for suffix in ("", "_scale", "_scale_inv"):
            if f"{parts[0]}{suffix}" in weights:
                tensors = [weights.pop(f"{part}{suffix}") for part in parts]
                whole = torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
                weights[f"{parent}.{name}.weight{suffix}"] = tensors[0] if tensors[0].numel() == 1 else whole

    return change


def _write_consolidated(folder: Path) -> None:
    """A whole model in consolidated.safetensors, with down_proj zero."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file({**tensors, DOWN: torch.zeros_like(tensors[DOWN])}, folder / "consolidated.safetensors", {"format": "pt"})


def _write_old_index(folder: Path) -> None:
    """An index of shards that do not exist."""
    placed = {name: f"model-0000{1 + (name == DOWN)}-of-00002.safetensors" for name in load_file(folder / SINGLE)}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))


def _write_hidden(folder: Path) -> None:
    """What macOS writes to other file systems (AppleDouble)."""
    (folder / "._model.safetensors").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(120))


def _make_integers(block: Config) -> None:
    """Weights and activations of type int, in a format that has both types."""
    group = block["config_groups"]["group_0"]
    for part in ("weights", "input_activations"):
        group[part]["type"] = "int"


def _times_32_in_e5m2(codes: torch.Tensor) -> torch.Tensor:
    """Codes up to 14336, which E5M2 has and E4M3 does not."""
    return (codes.float() * 32).to(torch.float8_e5m2)


def _drop_structure(block: Config) -> None:
    del block["config_groups"]["group_0"]["weights"]["block_structure"]


def _make_static(block: Config) -> None:
    block["config_groups"]["group_0"]["input_activations"]["dynamic"] = False


def _rename_format(block: Config) -> None:
    block["format"] = block["config_groups"]["group_0"]["format"] = "foo"


_NO_GROUPS = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "float-quantized", "ignore": []}


MISSING = {
    "bf16-no-norm1": Case("bf16", REFUSES, drop(NORM)),
    "bf16-no-final_norm": Case("bf16", REFUSES, drop(LAST_NORM)),
    "bf16-no-down": Case("bf16", WRONG, drop(DOWN)),
    "bf16-no-gate": Case("bf16", WRONG, drop(GATE)),
    "bf16-no-k": Case("bf16", WRONG, drop(K)),
    "bf16-no-embed": Case("bf16", WRONG, drop(EMBED)),
    "bf16-no-head": Case("bf16", WRONG, drop(HEAD)),
    "bf16_tied-no-embed": Case("bf16_tied", WRONG, drop(EMBED)),
    "bf16_tied-only-head": Case("bf16_tied", WRONG, lambda w, _: w.update({HEAD: w.pop(EMBED)})),
    "bf16_tied-tie-no": Case("bf16_tied", WRONG, settings(tie_word_embeddings=False)),
    "bf16-layers-more": Case("bf16", REFUSES, settings(num_hidden_layers=4)),
    "bf16-attention-bias": Case("bf16", WRONG, settings(attention_bias=True)),
    "dyn-no-norm1": Case("dyn", WRONG, drop(NORM)),
    "dyn-no-down": Case("dyn", WRONG, drop(DOWN, DOWN_SCALE)),
    "dyn-no-embed": Case("dyn", WRONG, drop(EMBED)),
    "dyn-no-k-codes": Case("dyn", WRONG, drop(K)),
    "dyn-layers-more": Case("dyn", WRONG, settings(num_hidden_layers=4)),
    "dyn-no-scale-down": Case("dyn", WRONG, drop(DOWN_SCALE)),
    "block-no-scale-v": Case("block", WRONG, drop(f"{V}_scale_inv")),
    "tensor-no-scale-v": Case("tensor", OK, drop(f"{V}_scale")),
    "tensor-no-scale-q": Case("tensor", WRONG, drop(f"{Q}_scale")),
    "tensor-no-scale-down": Case("tensor", WRONG, drop(DOWN_SCALE)),
    "static-no-input-scale": Case("static", WRONG, drop(DOWN_INPUT)),
    "static-no-input-scale-q": Case("static", OK, drop(Q.replace("weight", "input_scale"))),
}

UNEXPECTED = {
    "bf16-extra-module": Case("bf16", REFUSES, add(f"{LAYER}foo.weight")),
    "bf16-extra-top": Case("bf16", REFUSES, add("foo.weight")),
    "bf16-extra-k_scale": Case("bf16", REFUSES, add(f"{LAYER}self_attn.k_scale")),
    "bf16-extra-rotary": Case("bf16", OK, add(f"{LAYER}self_attn.rotary_emb.inv_freq")),
    "bf16-extra-bias-o": Case("bf16", OK, add(O.replace("weight", "bias"), torch.ones(HIDDEN))),
    "bf16-extra-bias-q": Case("bf16", OK, add(Q.replace("weight", "bias"), torch.ones(HIDDEN))),
    "bf16-extra-bias-norm": Case("bf16", OK, add(NORM.replace("weight", "bias"), torch.ones(HIDDEN))),
    "bf16-extra-bias-module": Case("bf16", REFUSES, add(f"{LAYER}foo.bias", torch.ones(HIDDEN))),
    "bf16-layers-fewer": Case("bf16", REFUSES, settings(num_hidden_layers=2)),
    "bf16-no-prefix": Case(
        "bf16", REFUSES, lambda w, _: [w.update({n.removeprefix("model."): w.pop(n)}) for n in list(w)]
    ),
    "dyn-extra-input_scale": Case("dyn", REFUSES, add(DOWN_INPUT)),
    "dyn-extra-g_idx": Case("dyn", OK, add(DOWN.replace("weight", "g_idx"))),
    "dyn-extra-zero_point": Case("dyn", REFUSES, add(f"{DOWN}_zero_point")),
    "block-extra-scale": Case("block", REFUSES, lambda w, _: w.update({DOWN_SCALE: w[f"{DOWN}_scale_inv"].clone()})),
    "dyn-kv-scales": Case("dyn", OK, both(_kv("{k}_scale"), q(lambda block: block.update(kv_cache_scheme=KV_SCHEME)))),
    "dyn-kv-scales-no-scheme": Case("dyn", OK, _kv("{k}_scale")),
    "block-kv-scales": Case("block", OK, _kv("{k}_scale")),
    "block-kv-scale-in-proj": Case("block", OK, _kv("{k}_proj.{k}_scale")),
    "dyn-kv-scale-in-proj": Case("dyn", OK, _kv("{k}_proj.{k}_scale")),
    "dyn-kv-output-scale": Case("dyn", REFUSES, _kv("{k}_proj.output_scale")),
    "dyn-kv-scale-of-two": Case("dyn", REFUSES, add(f"{LAYER}self_attn.k_scale", torch.ones(2))),
    "bf16-extra-fused-qkv": Case("bf16", OK, _fuse("qkv_proj", Q, K, V)),
    "bf16-extra-fused-gate-up": Case("bf16", OK, _fuse("gate_up_proj", GATE, UP)),
    "dyn-extra-fused-qkv": Case("dyn", OK, _fuse("qkv_proj", Q, K, V)),
    "bf16-extra-fused-short": Case("bf16", REFUSES, _fuse("qkv_proj", Q, K)),
}

SHAPES = {
    "bf16-shape-down-T": Case("bf16", REFUSES, edit(DOWN, lambda t: t.T)),
    "bf16-shape-k-rows+": Case("bf16", OK, edit(K, _pad(64, 0))),
    "bf16-shape-k-rows-": Case("bf16", REFUSES, edit(K, lambda t: t[:64])),
    "bf16-shape-down-cols+": Case("bf16", OK, edit(DOWN, _pad(0, 128))),
    "bf16-shape-down-rows+": Case("bf16", REFUSES, edit(DOWN, _pad(64, 0))),
    "bf16-shape-norm-short": Case("bf16", REFUSES, edit(NORM, lambda t: t[:128])),
    "bf16-shape-embed-rows+": Case("bf16", REFUSES, edit(EMBED, _pad(64, 0))),
    "bf16-kv1": Case("bf16", WRONG, settings(num_key_value_heads=1)),
    "bf16-inner-less": Case("bf16", WRONG, settings(intermediate_size=256)),
    "bf16-vocab": Case("bf16", REFUSES, settings(vocab_size=512)),
    "dyn-shape-norm-short": Case("dyn", REFUSES, edit(NORM, lambda t: t[:128])),
    "dyn-scale-flat-q": Case("dyn", REFUSES, edit(f"{Q}_scale", torch.flatten)),
    "dyn-scale-one-down": Case("dyn", REFUSES, edit(DOWN_SCALE, lambda t: t[:1])),
    "dyn-scale-rows+-q": Case("dyn", OK, edit(f"{Q}_scale", lambda t: torch.cat([t, t]))),
    "dyn-scale-rows+-down": Case("dyn", REFUSES, edit(DOWN_SCALE, lambda t: torch.cat([t, t]))),
    "tensor-scale-scalar-q": Case("tensor", OK, edit(f"{Q}_scale", lambda t: t[0])),
    "tensor-scale-2d-down": Case("tensor", REFUSES, edit(DOWN_SCALE, lambda t: t[None])),
    "block-scale-T-down": Case("block", REFUSES, edit(f"{DOWN}_scale_inv", lambda t: t.T)),
    "block-scale-cols+-down": Case("block", OK, edit(f"{DOWN}_scale_inv", lambda t: torch.cat([t, t], 1))),
}

DTYPES = {
    "dyn-scales-bf16": Case("dyn", OK, edit_all("_scale", lambda t: t.bfloat16())),
    "dyn-scales-i32": Case("dyn", WRONG, edit_all("_scale", lambda t: t.int())),
    "dyn-codes-u8": Case("dyn", WRONG, edit(DOWN, lambda t: t.view(torch.uint8))),
    "dyn-codes-f32": Case("dyn", OK, edit(DOWN, lambda t: t.float())),
    "dyn-codes-e5m2": Case("dyn", OK, edit(DOWN, lambda t: t.float().to(torch.float8_e5m2))),
    "dyn-codes-e5m2-large": Case("dyn", WRONG, both(edit(DOWN, _times_32_in_e5m2), edit(DOWN_SCALE, lambda t: t / 32))),
    "dyn-embed-fp8": Case("dyn", REFUSES, in_fp8(EMBED)),
    "dyn-embed-fp8-noscale": Case("dyn", WRONG, in_fp8(EMBED, scale=False)),
    "dyn-norm-fp8": Case("dyn", OK, edit(NORM, lambda t: t.to(torch.float8_e4m3fn))),
    "dyn-norm-codes": Case("dyn", WRONG, edit(NORM, lambda t: (t * (448 / t.abs().max())).to(torch.float8_e4m3fn))),
    "dyn-head-fp8": Case("dyn", REFUSES, in_fp8(HEAD)),
    "block-head-fp8-unlisted": Case(
        "block", REFUSES, both(in_fp8(HEAD, "fp8-block"), q(lambda block: block.update(modules_to_not_convert=[])))
    ),
    "bf16-down-fp8": Case("bf16", WRONG, in_fp8(DOWN, scale=False)),
    "bf16-dtype-norm-f32": Case("bf16", OK, edit(NORM, lambda t: t.float())),
    "bf16-dtype-norm-i32": Case("bf16", WRONG, edit(NORM, lambda t: t.int())),
    "bf16-dtype-down-i8": Case("bf16", WRONG, edit(DOWN, lambda t: (t.float() * 100).to(torch.int8))),
}

LISTS = {
    "dyn-down-bf16": Case("dyn", WRONG, in_bf16(DOWN)),
    "dyn-q-bf16": Case("dyn", WRONG, in_bf16(Q)),
    "dyn-q-bf16-listed": Case("dyn", REFUSES, both(in_bf16(Q), listed(Q[:-7]))),
    "dyn-qkv-bf16-re": Case("dyn", OK, both(in_bf16(Q, K, V), listed(r"re:.*layers\.1\.self_attn\.(q|k|v)_proj"))),
    "dyn-qkv-bf16-fusedname": Case("dyn", OK, both(in_bf16(Q, K, V), listed(f"{LAYER}self_attn.qkv_proj"))),
    "dyn-mlp-bf16-parent": Case("dyn", WRONG, both(in_bf16(*MLP), listed(f"{LAYER}mlp"))),
    "dyn-mlp-bf16-re": Case("dyn", OK, both(in_bf16(*MLP), listed(r"re:.*layers\.1\.mlp.*"))),
    "dyn-q-listed": Case("dyn", REFUSES, listed(Q[:-7])),
    "dyn-down-listed": Case("dyn", REFUSES, listed(DOWN[:-7])),
    "dyn-down-listed-re": Case("dyn", REFUSES, listed("re:.*layers.1.mlp.down.*")),
    "dyn-listed-parent": Case("dyn", OK, listed(f"{LAYER}mlp")),
    "dyn-listed-class": Case("dyn", OK, listed("Linear")),
    "dyn-listed-re-anywhere": Case("dyn", OK, listed("re:down_proj")),
    "dyn-ignore-empty": Case("dyn", OK, q(lambda block: block.update(ignore=[]))),
    "block-down-bf16": Case("block", WRONG, in_bf16(DOWN)),
    "block-mlp-bf16-parent": Case("block", WRONG, both(in_bf16(*MLP), listed(f"{LAYER}mlp"))),
    "block-q-bf16-listed": Case("block", REFUSES, both(in_bf16(Q), listed(Q[:-7]))),
    "block-down-bf16-noprefix": Case("block", WRONG, both(in_bf16(DOWN), listed(DOWN[6:-7]))),
    "block-listed-re": Case("block", OK, listed("re:.*down_proj")),
    "block-no-list": Case("block", OK, q(lambda block: block.pop("modules_to_not_convert"))),
    "dyn-target-re": Case(
        "dyn", OK, q(lambda block: block["config_groups"]["group_0"].update(targets=["re:.*_proj$"]))
    ),
    "dyn-target-none": Case(
        "dyn", REFUSES, q(lambda block: block["config_groups"]["group_0"].update(targets=["re:.*x$"]))
    ),
    "dyn-head-target": Case(
        "dyn",
        OK,
        both(
            in_fp8(HEAD),
            q(lambda block: block.update(ignore=[])),
            q(lambda block: block["config_groups"]["group_0"].update(targets=["Linear", "lm_head"])),
        ),
    ),
}

CONFIGS = {
    "dyn-qlost": Case("dyn", REFUSES, lambda _, raw: raw.pop("quantization_config")),
    "dyn-over-bf16": Case("bf16", WRONG, settings(quantization_config=block_of("ct-row", ["lm_head"]))),
    "block-over-bf16": Case("bf16", WRONG, settings(quantization_config=block_of("fp8-block", ["lm_head"]))),
    "dyn-method-unknown": Case("dyn", REFUSES, q(lambda block: block.update(quant_method="foo"))),
    "dyn-strategy-tensor": Case("dyn", REFUSES, group(strategy="tensor")),
    "tensor-strategy-channel": Case("tensor", REFUSES, group(strategy="channel")),
    "dyn-strategy-unknown": Case("dyn", REFUSES, group(strategy="foo")),
    "dyn-status-frozen": Case("dyn", OK, q(lambda block: block.update(quantization_status="frozen"))),
    "block-static": Case("block", REFUSES, q(lambda block: block.update(activation_scheme="static"))),
    "block-scheme-none": Case("block", REFUSES, q(lambda block: block.pop("activation_scheme"))),
    "block-size-null": Case("block", REFUSES, q(lambda block: block.update(weight_block_size=None))),
    "block-as-ct": Case("block", REFUSES, settings(quantization_config=block_of("ct-block", ["lm_head"]))),
    "block-size-of-three": Case("block", REFUSES, q(lambda block: block.update(weight_block_size=[128, 128, 1]))),
    "ctblock-no-structure": Case("ctblock", REFUSES, q(_drop_structure)),
    "ctblock-static": Case("ctblock", REFUSES, q(_make_static)),
    "auto-scheme-unknown": Case("auto", REFUSES, q(lambda block: block.update(activation_scheme="foo"))),
    "dyn-format-unknown": Case("dyn", REFUSES, q(_rename_format)),
    "dyn-asymmetric": Case("dyn", REFUSES, group(symmetric=False)),
    "dyn-strategy-group": Case("dyn", REFUSES, group(strategy="group", group_size=128)),
    "dyn-ignore-word": Case("dyn", REFUSES, q(lambda block: block.update(ignore=3))),
    "bf16-block-empty": Case("bf16", OK, settings(quantization_config={})),
    "bf16-groups-none": Case("bf16", OK, settings(quantization_config=_NO_GROUPS)),
    "bf16-act-gelu": Case("bf16", REFUSES, settings(hidden_act="gelu")),
    "bf16-no-architectures": Case("bf16", OK, lambda _, raw: raw.pop("architectures")),
    "bf16-class-of-qwen2": Case("bf16", WRONG, settings(architectures=["Qwen2ForCausalLM"])),
    "bf16-class-of-qwen3": Case("bf16", REFUSES, settings(architectures=["Qwen3ForCausalLM"])),
    "dyn-type-int": Case("dyn", WRONG, q(_make_integers)),
    "auto-static": Case("auto", WRONG, q(lambda block: block.update(activation_scheme="static"))),
    "autostatic-dynamic": Case("autostatic", REFUSES, q(lambda block: block.update(activation_scheme="dynamic"))),
    "bf16-tie-yes": Case("bf16", OK, settings(tie_word_embeddings=True)),
    "dyn-tie-yes": Case("dyn", OK, settings(tie_word_embeddings=True)),
    "ragged-fp8-gateup-n": Case("bf16", REFUSES, ragged("fp8-block", "gate_proj", "up_proj")),
    "ragged-ct-gateup-n": Case("bf16", REFUSES, ragged("ct-block", "gate_proj", "up_proj")),
}

FILES = {
    "dyn-stray": Case("dyn", OK, after=stray("stray.weight", torch.ones(2, 2)), shards=2),
    "bf16-stray-single": Case("bf16", REFUSES, after=stray("stray.weight", torch.ones(2, 2))),
    "bf16-stray-copy": Case("bf16", WRONG, after=_zero_copy("stray.safetensors")),
    "bf16-stray-copy-before": Case("bf16", OK, after=_zero_copy("a.safetensors")),
    "bf16-stray-consolidated": Case("bf16", REFUSES, after=_zero_copy("consolidated.safetensors")),
    "bf16-consolidated-old": Case("bf16", WRONG, after=_write_consolidated, shards=2),
    "bf16-index-old": Case("bf16", REFUSES, after=_write_old_index),
    "bf16_tied-hidden-file": Case("bf16_tied", REFUSES, after=_write_hidden),
    "bf16_tied-stray-head": Case(
        "bf16_tied",
        WRONG,
        after=stray("base_model.model.lm_head.weight", torch.ones(VOCABULARY, HIDDEN), "adapter_model.safetensors"),
        shards=2,
    ),
    "bf16-shards-no-index": Case("bf16", OK, after=lambda folder: (folder / INDEX).unlink(), shards=2),
    "dyn-shard-missing": Case("dyn", REFUSES, after=lambda folder: max(folder.glob("model-*")).unlink(), shards=2),
    "dyn-index-entry-lost": Case("dyn", OK, after=edit_index(lambda places: places.pop(DOWN)), shards=2),
    "bf16-index-ghost": Case(
        "bf16", OK, after=edit_index(lambda places: places.update(foo="model-00001-of-00002.safetensors")), shards=2
    ),
    "bf16-no-tokenizer": Case("bf16", REFUSES, after=unlink("tokenizer.json", "tokenizer_config.json")),
    "bf16-half-tokenizer": Case("bf16", REFUSES, after=unlink("tokenizer.json")),
    "bf16-duplicate": Case("bf16", WRONG, after=zero_in_later_shard, shards=2),
    "bf16-truncated": Case("bf16", REFUSES, after=rewrite(lambda raw: raw[:-1000])),
    "bf16-header": Case("bf16", REFUSES, after=rewrite(lambda raw: raw[:8] + b"oops" + raw[12:])),
    "bf16-no-weights": Case("bf16", REFUSES, after=lambda folder: (folder / SINGLE).unlink()),
    "bf16-index-broken": Case("bf16", REFUSES, after=lambda folder: (folder / INDEX).write_text("{"), shards=2),
}

VALUES = {
    "dyn-nan-codes": Case("dyn", WRONG, _byte(0x7F)),
    "dyn-scale-nan": Case("dyn", WRONG, edit(DOWN_SCALE, lambda t: t * float("nan"))),
    "dyn-scale-zero": Case("dyn", WRONG, edit(DOWN_SCALE, lambda t: t * 0)),
    "dyn-scales-one": Case("dyn", WRONG, edit(DOWN_SCALE, torch.ones_like)),
    "bf16-nan": Case("bf16", WRONG, edit(DOWN, lambda t: t * float("nan"))),
}

FAMILIES = {
    f"{name}@{family}": Case(f"{form}@{family}", outcome, change)
    for family in sorted(name.removesuffix("ForCausalLM").lower() for name in LOADED_CLASSES)
    if family != "llama"
    for name, form, outcome, change in (
        ("dyn-good", "dyn", OK, None),
        ("bf16-no-norm1", "bf16", REFUSES, drop(NORM)),
        ("bf16-no-down", "bf16", WRONG, drop(DOWN)),
        ("dyn-no-norm1", "dyn", WRONG, drop(NORM)),
        ("dyn-extra-module", "dyn", REFUSES, add(f"{LAYER}foo.weight")),
    )
}

CASES = {**MISSING, **UNEXPECTED, **SHAPES, **DTYPES, **LISTS, **CONFIGS, **FILES, **VALUES, **FAMILIES}

#: loaded in vLLM, not compared with a folder that is known to be right
WITHOUT_REFERENCE = ("dyn-qkv-bf16-re", "dyn-qkv-bf16-fusedname")
