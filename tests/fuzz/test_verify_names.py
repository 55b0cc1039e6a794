"""Model folders with unusual tensor names, dtypes and settings: `verify` must report all that loading rejects.

    python -m tests.fuzz.test_verify_names --cases 10000 --seed 1

A good folder gets additional tensors (scales of a KV cache under known and similar names, layers for multi-token
prediction, heads, tied tensors), loses tensors, or has a tensor with a different dtype; its config.json gets unusual
values. Loading must succeed, or reject the folder with a message. `verify` must report every rejected folder, and
`--against` every tensor that is missing compared with the reference.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import checkpoint, models
from tests.checkpoint import folders
from tests.fuzz import mutate
from tests.fuzz.bounded import Finding, command, outcome

WEIGHTS = "model.safetensors"
SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_proj.output_scale", "v_proj.output_scale",
          "k_proj.k_scale", "kv_cache_scale")  # fmt: skip
NEAR = ("k_scales", "scale", "k_proj.scale", "o_proj.output_scale", "K_scale", "k_scale.weight", "w_scale",
        "k_proj.weight_scale", "q_proj.weight_scale_inv", "k_proj.input_scale", "k_proj.zero_point")  # fmt: skip
MORE = ("mtp.fc.weight", "score.weight", "lm_head.weight", "model.layers.9.mlp.up_proj.weight", "v_head.summary.weight",
        "base_model.model.x.lora_A.weight", "model.embed_tokens.weight_scale")  # fmt: skip
DTYPES = (torch.int32, torch.int8, torch.uint8, torch.bool, torch.float16, torch.float64, torch.float8_e4m3fn,
          torch.float8_e5m2, torch.int64)  # fmt: skip
NUMBERS = (-3, 0, -1, 1, 2.5, -1e-6, 10**6, None, "3", True, [1], 1e300)
KEYS = ("sliding_window", "rope_theta", "rms_norm_eps", "max_position_embeddings", "vocab_size", "eos_token_id",
        "num_key_value_heads", "attention_dropout", "tie_word_embeddings", "pad_token_id")  # fmt: skip
SCHEMES = (None, {}, "static", {"num_bits": 8, "type": "float", "dynamic": False}, {"dynamic": True}, 3, ["fp8"])


def add_scales(rng: random.Random, weights: dict[str, Tensor]) -> None:
    value = torch.tensor(rng.choice((0.5, 1.0, 0.0, -1.0, float("nan"), float("inf"))))
    value = value.to(rng.choice((torch.float32, torch.bfloat16, torch.float16)))
    for layer in range(rng.choice((1, 2))):
        for name in rng.sample(SCALES + NEAR, rng.choice((1, 2, 4))):
            weights[f"model.layers.{layer}.self_attn.{name}"] = value.clone()


def add_tensors(rng: random.Random, weights: dict[str, Tensor]) -> None:
    weights[rng.choice(MORE)] = torch.randn(rng.choice(((4, 4), (512, 256), ())), dtype=torch.bfloat16)


def drop_tensor(rng: random.Random, weights: dict[str, Tensor]) -> None:
    del weights[rng.choice(sorted(weights))]


def change_dtype(rng: random.Random, weights: dict[str, Tensor]) -> None:
    name = rng.choice(sorted(weights))
    weights[name] = weights[name].float().clamp(0, 100).to(rng.choice(DTYPES))


def rename_tensor(rng: random.Random, weights: dict[str, Tensor]) -> None:
    name = rng.choice(sorted(weights))
    change: Callable[[str], str] = rng.choice(
        (lambda n: "model." + n, lambda n: n.removeprefix("model."), lambda n: n.replace("layers.1", "layers.5"))
    )
    weights[change(name)] = weights.pop(name)


TENSORS = (add_scales, add_scales, add_tensors, drop_tensor, change_dtype, rename_tensor)


def damage(rng: random.Random, folder: Path) -> str:
    """Make one or two changes to a folder. Returns a description of them."""
    done = []
    for _ in range(rng.choice((1, 1, 2))):
        how = rng.random()
        if how < 0.6:
            change = rng.choice(TENSORS)
            weights = load_file(folder / WEIGHTS)
            change(rng, weights)
            save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
            done.append(change.__name__)
            continue
        raw = json.loads((folder / "config.json").read_text())
        if how < 0.75 and "quantization_config" in raw:
            raw["quantization_config"]["kv_cache_scheme"] = scheme = rng.choice(SCHEMES)
            done.append(f"kv_cache_scheme {scheme!r}")
        else:
            key, value = rng.choice(KEYS), rng.choice(NUMBERS)
            raw[key] = value
            done.append(f"{key} {value!r}")
        (folder / "config.json").write_text(json.dumps(raw))
    return ", ".join(done)


def run(seed: int, cases: int) -> list[Finding]:
    rng = random.Random(seed)
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as place:
        tiny = folders.tokenizers(Path(place) / "tiny")
        kinds = [folders.write(form, Path(place) / form, tiny, "qwen3_tied", shards=1) for form in
                 ("plain", "ct-row", "fp8-block")]  # fmt: skip
        folder = Path(place) / "case"
        for number in range(cases):
            good = rng.choice(kinds)
            mutate.copy_tree(good, folder)
            case = f"case {number} of seed {seed}, {good.name}: {damage(rng, folder)}"

            def load(folder: Path = folder) -> None:
                models.load(folder)
                models.load_processor(folder)

            refused = outcome(load, folder, case, found)
            verified: list[checkpoint.VerifyResult] = []
            outcome(lambda: verified.append(checkpoint.verify(folder)), folder, f"{case}, verify", found)  # noqa: B023
            if refused and verified and verified[0].ok:
                found.append(Finding(case, f"verify reports nothing, but loading failed: {refused}"))
            against: list[checkpoint.VerifyResult] = []
            aside: list[Finding] = []
            outcome(lambda: against.append(checkpoint.verify(good, folder)), folder, case, aside)  # noqa: B023
            # An error may be about the good folder.
            found += [finding for finding in aside if "names no file" not in finding.what]
            extra = sorted(set(load_file(folder / WEIGHTS)) - set(load_file(good / WEIGHTS)) - {"lm_head.weight"})
            # transformers accepts a second `model.` prefix, so such a tensor has its counterpart.
            lost = [n for n in extra if "scale" not in n and "zero_point" not in n and not n.startswith("model.model.")]
            if against and lost and not all(any(name in f.text for f in against[0].findings) for name in lost):
                found.append(Finding(case, f"--against does not name {lost}"))
    return found


@pytest.mark.long
def test_modified_folders_are_accepted_or_reported() -> None:
    assert run(seed=5, cases=60) == []


if __name__ == "__main__":
    command(run, cases=10_000, seed=0)
