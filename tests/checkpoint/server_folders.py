"""Small model folders with one thing wrong each, and what vLLM 0.32 did when it loaded them on a CPU.

The model is a Llama with hidden 256, inner 384, 4 heads and 2 of keys and values, 3 layers, random weights, and norms
that are not 1, in BF16 and in each FP8 form. `server_cases` has the outcome of each case: refused, or loaded with the
answers of the good folder, or with other ones. vLLM's own config and loader were run, and all linear layers, norms and
embeddings on fixed inputs (attention has no weights). Its memory was filled with a pattern before it was allocated, so
that uninitialized parameters show. vLLM for CPUs has no kernel for a scale per tensor and for blocks; there a kernel
that decodes and multiplies was patched in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.folders import block_of, cast

OK, WRONG, REFUSES = "ok", "loads, wrong answers", "refuses"
FORMS = {"dyn": "ct-row", "tensor": "ct-tensor", "ctblock": "ct-block", "block": "fp8-block"}
HIDDEN, INNER, KEYS, VOCABULARY, LAYERS = 256, 384, 128, 448, 3
LAYER = "model.layers.1."
DOWN, GATE, UP = (f"{LAYER}mlp.{part}_proj.weight" for part in ("down", "gate", "up"))
Q, K, V, O = (f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo")  # noqa: E741
NORM, LAST_NORM = f"{LAYER}input_layernorm.weight", "model.norm.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
Weights = dict[str, Tensor]
Config = dict[str, Any]
Change = Callable[[Weights, Config], object]


@dataclass(frozen=True)
class Case:
    """base: the good folder; vllm: what vLLM does; change: of tensors and config.json; after: of the written files."""

    base: str
    vllm: str
    change: Change | None = None
    after: Callable[[Path], object] | None = None
    shards: int = 1


@cache
def plain(inner: int = INNER) -> Weights:
    """The weights in BF16."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int, std: float = 0.06) -> Tensor:
        return (torch.randn(*shape, generator=g) * std).bfloat16()

    weights = {
        EMBED: draw(VOCABULARY, HIDDEN, std=0.5),
        LAST_NORM: 1 + draw(HIDDEN, std=0.3),
        HEAD: draw(VOCABULARY, HIDDEN),
    }
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (inner, HIDDEN), "mlp.up_proj": (inner, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner),
    }  # fmt: skip
    for i in range(LAYERS):
        weights |= {f"model.layers.{i}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = 1 + draw(HIDDEN, std=0.3)
    return weights


def config(**changes: object) -> Config:
    """config.json of the model."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 445, "eos_token_id": 446, "pad_token_id": 444, **changes,
    }  # fmt: skip


def quantize(weights: Weights, form: str, only: tuple[str, ...] = ("_proj",)) -> Weights:
    """The weights whose layers end in `only` in FP8, with scales; fused layers share a scale per tensor."""
    out = dict(weights)
    for name in [name for name in weights if name.endswith(tuple(f"{o}.weight" for o in only))]:
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        group = next((g for g in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if leaf in g), (leaf,))
        peak = max(float(weights[f"{parent}.{part}.weight"].float().abs().max()) for part in group)
        scale = torch.tensor([peak / 448]) if form == "ct-tensor" else None
        out[name], out[name + ("_scale_inv" if form == "fp8-block" else "_scale")] = cast(weights[name], form, scale)
    return out


def _to_family(family: str, weights: Weights, raw: Config) -> None:
    """Add what another family has: biases of q, k and v (Qwen2), norms of each head (Qwen3), nothing (Mistral)."""
    raw |= {"model_type": family, "architectures": [f"{family.title()}ForCausalLM"]}
    for i in range(LAYERS):
        attention = f"model.layers.{i}.self_attn"
        if family == "qwen2":
            sizes = {"q": HIDDEN, "k": KEYS, "v": KEYS}
            weights |= {f"{attention}.{p}_proj.bias": torch.full((n,), 0.1).bfloat16() for p, n in sizes.items()}
        if family == "qwen3":
            weights |= {f"{attention}.{p}_norm.weight": torch.full((64,), 1.25).bfloat16() for p in "qk"}


def base(name: str) -> tuple[Weights, Config]:
    """The tensors and config.json of a good folder: of a Llama, or of another family ("dyn@qwen2")."""
    name, _, family = name.partition("@")
    kind = name.removesuffix("_tied")
    weights, raw = dict(plain()), config(tie_word_embeddings=kind != name)
    if kind != name:
        del weights[HEAD]
    form = FORMS.get(kind, "ct-tensor")
    if kind != "bf16":
        weights, raw["quantization_config"] = quantize(weights, form), block_of(form, ["lm_head"])
    if kind.startswith("auto"):
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "ignored_layers": ["lm_head"],
        }
    if kind.endswith("static"):
        inputs = {
            name.replace("weight_scale", "input_scale"): torch.tensor([0.05]) for name in weights if "_scale" in name
        }
        weights |= inputs
        static = {"dynamic": False, "strategy": "tensor"}
        if kind == "static":
            raw["quantization_config"]["config_groups"]["group_0"]["input_activations"] |= static
        else:
            raw["quantization_config"]["activation_scheme"] = "static"
    if family:
        _to_family(family, weights, raw)
    return weights, raw


def write(case: Case, folder: Path, tokenizer: Path) -> Path:
    """Write the folder of a case. `tokenizer`: a tiny Llama, whose other files are copied."""
    folder.mkdir(parents=True)
    weights, raw = base(case.base)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    if case.change:
        case.change(weights, raw)
    (folder / "config.json").write_text(json.dumps(raw))
    for file in tokenizer.iterdir():
        if file.name != "config.json" and not file.name.endswith(".safetensors"):
            shutil.copy(file, folder)
    weights = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    if case.shards == 1:
        save_file(weights, folder / SINGLE, {"format": "pt"})
    else:
        placed = {}
        for i in range(case.shards):
            file_name = f"model-{i + 1:05d}-of-{case.shards:05d}.safetensors"
            names = sorted(weights)[i :: case.shards]
            save_file({name: weights[name] for name in names}, folder / file_name, {"format": "pt"})
            placed |= dict.fromkeys(names, file_name)
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))
    if case.after:
        case.after(folder)
    return folder


# Changes -------------------------------------------------------------------------------------------------------------


def drop(*names: str) -> Change:
    return lambda weights, _: [weights.pop(name) for name in names]


def add(name: str, tensor: Tensor | None = None) -> Change:
    return lambda weights, _: weights.update({name: torch.ones(1) if tensor is None else tensor})


def edit(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda weights, _: weights.update({name: change(weights[name])})


def edit_all(end: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda weights, _: weights.update({n: change(t) for n, t in weights.items() if n.endswith(end)})


def settings(**changes: object) -> Change:
    return lambda _, raw: raw.update(changes)


def q(change: Callable[[Config], object]) -> Change:
    """A change of quantization_config."""
    return lambda _, raw: change(raw["quantization_config"])


def group(**changes: object) -> Change:
    """A change of the weights' scheme of compressed-tensors."""
    return q(lambda block: block["config_groups"]["group_0"]["weights"].update(changes))


def listed(*names: str) -> Change:
    return q(lambda block: block["ignore" if "ignore" in block else "modules_to_not_convert"].extend(names))


def in_bf16(*names: str) -> Change:
    """Layers in BF16 again, without scales."""

    def change(weights: Weights, _: Config) -> None:
        for name in names:
            weights[name] = plain()[name]
            weights.pop(f"{name}_scale", weights.pop(f"{name}_scale_inv", None))

    return change


def both(*changes: Change) -> Change:
    return lambda weights, raw: [change(weights, raw) for change in changes]


def in_fp8(name: str, form: str = "ct-row", scale: bool = True) -> Change:
    def change(weights: Weights, _: Config) -> None:
        weights[name], scales = cast(weights[name], form)
        if scale:
            weights[name + ("_scale_inv" if form == "fp8-block" else "_scale")] = scales

    return change


def ragged(form: str, *only: str, inner: int = 320) -> Change:
    """Another inner size, and the named layers in blocks of 128."""

    def change(weights: Weights, raw: Config) -> None:
        weights.clear()
        weights.update(quantize(plain(inner), form, only))
        high = [
            n.removesuffix(".weight")
            for n, t in weights.items()
            if n.endswith("_proj.weight") and t.dtype is torch.bfloat16
        ]
        raw.update(intermediate_size=inner, quantization_config=block_of(form, ["lm_head", *high]))

    return change


def edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], object]:
    def after(folder: Path) -> None:
        raw = json.loads((folder / INDEX).read_text())
        change(raw["weight_map"])
        (folder / INDEX).write_text(json.dumps(raw))

    return after


def stray(name: str, tensor: Tensor, file: str = "stray.safetensors") -> Callable[[Path], object]:
    return lambda folder: save_file({name: tensor}, folder / file, {"format": "pt"})


def unlink(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))


def zero_in_later_shard(folder: Path) -> None:
    """down_proj a second time, zero, in the shard that is read last."""
    first, last = sorted(folder.glob("model-*.safetensors"))
    tensors = load_file(last)
    assert DOWN not in tensors and DOWN in load_file(first)
    save_file({**tensors, DOWN: torch.zeros(HIDDEN, INNER, dtype=torch.bfloat16)}, last, {"format": "pt"})
