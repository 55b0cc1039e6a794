"""Model folders for the server: four layers of a pretrained model, a padded one, and folders with one thing wrong.

Sizes of SmolLM2 are no multiples of 128, which blocks need: `pad` gives it sizes that are, with zeros, and the same
outputs. A `Damage` changes the tensors and config.json of a good folder.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn
FMAX = torch.finfo(FP8).max
LAYER = "model.layers.2."
DOWN, QUERY = f"{LAYER}mlp.down_proj.weight", f"{LAYER}self_attn.q_proj.weight"
NORM = f"{LAYER}input_layernorm.weight"
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


def read(folder: Path) -> tuple[Tensors, Config]:
    """The tensors of a folder's one safetensors file and its config.json."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file), json.loads((folder / "config.json").read_text())


def write(folder: Path, tensors: Tensors, config: Config, companions: Path) -> Path:
    """A folder with these tensors and config.json; the other files are copied from `companions`."""
    folder.mkdir(parents=True)
    copies = {name: value.clone().contiguous() for name, value in tensors.items()}  # no two may share memory
    save_file(copies, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for file in companions.iterdir():
        # without the list of an export's files, which names other contents
        if file.is_file() and file.suffix != ".safetensors" and file.name not in ("config.json", "octavo_export.json"):
            shutil.copyfile(file, folder / file.name)
    return folder


def cut(source: Path, folder: Path, layers: int = 4) -> Path:
    """The first layers of a model."""
    tensors, config = read(source)
    first = {n: v for n, v in tensors.items() if ".layers." not in n or int(n.split(".")[2]) < layers}
    return write(folder, first, {**config, "num_hidden_layers": layers}, source)


def pad(source: Path, folder: Path, hidden: int = 768, heads: tuple[int, int] = (12, 4)) -> Path:
    """SmolLM2 with `hidden` instead of 576 numbers, and other numbers of heads (queries, keys) instead of 9 and 3.

    What is new is zero. RMSNorm divides by the root of a mean over more numbers, so its weights are multiplied by
    sqrt(576 / hidden), and its epsilon by 576 / hidden.
    """
    tensors, config = read(source)
    ratio, queries = config["hidden_size"] / hidden, 64 * heads[0]
    sizes = {"q_proj": (queries, hidden), "o_proj": (hidden, queries), "down_proj": (hidden, None)}
    sizes |= dict.fromkeys(("k_proj", "v_proj"), (64 * heads[1], hidden))
    sizes |= dict.fromkeys(("gate_proj", "up_proj", "embed_tokens"), (None, hidden))
    padded = {}
    for name, value in tensors.items():
        part = name.split(".")[-2]
        if value.dim() == 1:
            padded[name] = value.new_zeros(hidden)
            padded[name][: len(value)] = value.float() * math.sqrt(ratio)
            continue
        rows, columns = (size or old for size, old in zip(sizes[part], value.shape, strict=True))
        padded[name] = value.new_zeros(rows, columns)
        padded[name][: value.shape[0], : value.shape[1]] = value
    config |= {"hidden_size": hidden, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 64}
    config["rms_norm_eps"] *= ratio
    return write(folder, padded, config, source)


def blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and scales [ceil(N / 128), ceil(K / 128)] of a weight of any size."""
    n, k = weight.shape
    rows, columns = math.ceil(n / 128), math.ceil(k / 128)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[:n, :k] = weight.float()
    tiles = padded.view(rows, 128, columns, 128)
    scale = (tiles.abs().amax((1, 3)) / FMAX).clamp(min=1e-12)
    codes = (tiles / scale[:, None, :, None]).clamp(-FMAX, FMAX).view_as(padded)[:n, :k].to(FP8)
    return codes, scale


@dataclass(frozen=True)
class Base:
    """A good folder: the one in BF16 that it is made from, its format, and the kernel of the test that vLLM needs."""

    name: str
    plain: str = "bf16"
    format: str = ""
    kernel: str = ""


#: folders in BF16 with other sizes: hidden, and heads of queries and keys. "wide" keeps the rows of q, k and v, which
#: are no multiples of 128, with inputs that are.
PADDED = {"pad": (768, (12, 4)), "wide": (1152, (9, 3))}
BASES = {
    base.name: base
    for base in (
        Base("bf16"),
        Base("pad", plain="pad"),
        Base("wide", plain="wide"),
        Base("dyn", format="fp8-dynamic"),
        Base("tensor", format="fp8-tensor", kernel="tensor"),
        Base("block", plain="pad", format="fp8-block", kernel="block"),
    )
}
Change = Callable[[Tensors, Config, Tensors], tuple[Tensors, Config]]  # (tensors, config, BF16 tensors) of a copy


@dataclass(frozen=True)
class Damage:
    """`change` is applied to a copy of the folder of `base`, `after` to the files written.

    Right answers are those of `base`, or of a copy with another change, `right`.
    """

    name: str
    base: str
    change: Change
    after: Callable[[Path], None] = lambda folder: None
    kernel: str = ""
    right: Change | None = None


def _without(*names: str) -> Change:
    return lambda w, c, bf16: ({n: v for n, v in w.items() if n not in names}, c)


def _scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda w, c, bf16: ({n: change(v) if "_scale" in n else v for n, v in w.items()}, c)


def _plain(name: str, ignored: bool) -> Change:
    """One layer in BF16, in the list of ignored layers or not."""

    def change(w: Tensors, c: Config, bf16: Tensors) -> tuple[Tensors, Config]:
        w = {n: v for n, v in w.items() if n != f"{name}_scale"} | {name: bf16[name]}
        return w, _ignore(c, name) if ignored else c

    return change


def _ignore(config: Config, name: str) -> Config:
    config["quantization_config"]["ignore"].append(name.removesuffix(".weight"))
    return config


def _unquantized(config: Config) -> Config:
    del config["quantization_config"]
    return config


def _in_blocks(*parts: str) -> Change:
    """The layers whose names end so in blocks, whatever their sizes, and the others in BF16 by name."""

    def change(w: Tensors, c: Config, bf16: Tensors) -> tuple[Tensors, Config]:
        w, plain = dict(bf16), {"lm_head"}
        for name, value in bf16.items():
            layer = name.removesuffix(".weight")
            if layer.endswith(parts):
                w[name], w[f"{name}_scale_inv"] = blocks(value)
            elif layer.endswith("_proj"):
                plain.add(layer)
        quantized = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        return w, {**c, "quantization_config": {**quantized, "modules_to_not_convert": sorted(plain)}}

    return change


def _other_head(tied: bool) -> Change:
    def change(w: Tensors, c: Config, bf16: Tensors) -> tuple[Tensors, Config]:
        return w | {"lm_head.weight": w["model.embed_tokens.weight"].flip(0)}, {**c, "tie_word_embeddings": tied}

    return change


def _stray(folder: Path) -> None:
    """An index, and a file that it does not name."""
    names = load_file(folder / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"stray.weight": torch.ones(2, 2)}, folder / "stray.safetensors", metadata={"format": "pt"})


def _renamed(old: str, new: str) -> Change:
    return lambda w, c, bf16: ({n.replace(old, new): v for n, v in w.items()}, c)


DAMAGES = (
    Damage("dyn-missing-norm", "dyn", _without(NORM)),
    Damage("dyn-missing-linear", "dyn", _without(DOWN, f"{DOWN}_scale")),
    Damage("dyn-missing-scale", "dyn", _without(f"{DOWN}_scale")),
    Damage("bf16-missing-norm", "bf16", _without(NORM)),
    Damage("bf16-missing-linear", "bf16", _without(DOWN)),
    Damage("dyn-extra", "dyn", lambda w, c, bf16: (w | {f"{LAYER}foo.weight": torch.ones(4, 4)}, c)),
    Damage("dyn-skip-missing", "dyn", _plain(DOWN, ignored=False)),
    Damage("dyn-fused-mixed", "dyn", _plain(QUERY, ignored=True)),
    Damage("bf16-with-qconfig", "dyn", lambda w, c, bf16: (bf16, c)),
    Damage("dyn-scale-bf16", "dyn", _scales(lambda scale: scale.bfloat16())),
    Damage("dyn-scale-flat", "dyn", _scales(lambda scale: scale.flatten())),
    Damage("dyn-qlost", "dyn", lambda w, c, bf16: (w, _unquantized(c))),
    Damage("dyn-skip-covers", "dyn", lambda w, c, bf16: (w, _ignore(c, DOWN))),
    # the head of the file is used, although config.json ties it to the embedding
    Damage("bf16-tied-differs", "bf16", _other_head(tied=True), right=_other_head(tied=False)),
    Damage("dyn-stray", "dyn", lambda w, c, bf16: (w, c), after=_stray),
    Damage("block-scale-name", "block", _renamed("_scale_inv", "_scale"), kernel="block"),
    Damage("block-missing-scale", "block", _without(f"{DOWN}_scale_inv"), kernel="block"),
    Damage("block-down-ragged-n", "bf16", _in_blocks("down_proj"), kernel="block"),
    Damage("block-gateup-ragged-k", "bf16", _in_blocks("gate_proj", "up_proj", "down_proj"), kernel="block"),
    Damage("block-qkv-ragged-nk", "bf16", _in_blocks("_proj"), kernel="block"),
    Damage("block-qkv-ragged-n", "wide", _in_blocks("q_proj", "k_proj", "v_proj"), kernel="block"),
)


def damaged(damage: Damage, bases: Path, folder: Path) -> Path:
    """Write the folder of a damage; `bases` holds the good ones of four layers by their names."""
    _write_change(damage, damage.change, bases, folder)
    damage.after(folder)
    return folder


def right(damage: Damage, bases: Path, folder: Path) -> Path:
    """Write the folder whose answers are right for a damage that has `right`."""
    return _write_change(damage, damage.right, bases, folder)


def _write_change(damage: Damage, change: Change, bases: Path, folder: Path) -> Path:
    tensors, config = read(bases / damage.base)
    bf16, _ = read(bases / BASES[damage.base].plain)
    return write(folder, *change(tensors, config, bf16), companions=bases / damage.base)


def write_changed(source: Path, folder: Path) -> Path:
    """A folder of the same names and shapes, for an update: another layer's down_proj, and a norm twice as large."""
    tensors, config = read(source)
    changed = {NORM: tensors[NORM] * 2}
    changed |= {n: tensors[n.replace(".2.", ".1.")] for n in tensors if n.startswith(DOWN)}
    return write(folder, tensors | changed, config, source)
