"""Measures what massive activations cost: the held-out loss at equal weights with and without their layers in FP8.

    make real
    python benchmarks/massive_activations.py build/smollm2 build/smollm2-data/text.eval.jsonl \
        --json benchmarks/results/massive_activations.json

Nothing is trained. Each case runs the same rows, and its loss is compared with fp32's token by token. The first cases
have FP8 only in the layers whose inputs are massive, or in as many other `down_proj`. Cases that the file of --json
already has are not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import fp8
from octavo.train.forward.massive_activations import find_massive, watch_inputs

CURRENT = ("tensorwise", "rowwise", "blockwise")
FACTORS = (1, 2, 4, 8, 16, 32, 64)


def read_rows(folder: Path, file: Path, rows: int, length: int) -> Tensor:
    """Return the first tokens of the held-out texts, joined, [rows, length]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        ids += tokenizer(json.loads(line)["text"])["input_ids"]
    if len(ids) < rows * length:
        raise SystemExit(f"{file} has {len(ids)} tokens; --rows {rows} of {length} need {rows * length}")
    return torch.tensor(ids[: rows * length]).view(rows, length)


@torch.no_grad()
def token_losses(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of each predicted token, [rows x (length - 1)]."""
    parts = []
    for row in rows:
        logits = model(input_ids=row[None]).logits[0, :-1].float()
        parts.append(nn.functional.cross_entropy(logits, row[1:], reduction="none"))
    return torch.cat(parts)


def gradients(model: nn.Module, row: Tensor) -> dict[str, Tensor]:
    """Return the weight gradients of the linear layers for one row."""
    logits = model(input_ids=row[None]).logits[0, :-1].float()
    nn.functional.cross_entropy(logits, row[1:]).backward()
    grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if "proj" in name}
    model.zero_grad()
    return grads


def load(folder: Path, policy: fp8.Policy | None, row: Tensor) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if policy is not None:
        plan = fp8.plan(model, policy)
        fp8.apply(model, plan)
        if any(one.recipe is not None and one.recipe.delayed is not None for one in plan.rows):
            gradients(model.train(), row)  # delayed scales come from the forwards before
    return model


@torch.no_grad()
def layer_inputs(model: nn.Module, row: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """Return the input of each layer in the forward of a row, [1, tokens, K]."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, args: inputs.__setitem__(name, args[0])

    hooks = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in layers]
    model(input_ids=row[None])
    for hook in hooks:
        hook.remove()
    return inputs


@torch.no_grad()
def amplify(layer: nn.Module, x: Tensor) -> list[dict[str, object]]:
    """Return figures of a layer's input and output with its largest values (above a tenth of amax) times 1, 2, 4, ...:
    amax / RMS, the share of subnormal values, and the median over the tokens of |y - y of fp32| / |y of fp32|."""
    layers = {}
    for recipe in CURRENT:
        layers[recipe] = nn.Sequential(copy.deepcopy(layer))
        fp8.apply(layers[recipe], fp8.plan(layers[recipe], recipe))
    rows = []
    for factor in FACTORS:
        scaled = torch.where(x.abs() > x.abs().max() / 10, factor * x, x)
        exact, names = layer(scaled), nn.ModuleDict({"layer": layer})
        with watch_inputs(names, fp8.plan(names, "tensorwise")) as watch:
            names["layer"](scaled)
        figures = watch.statistics()["layer"]
        errors = {
            recipe: float(((low(scaled) - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
            for recipe, low in layers.items()
        }
        rows.append({"factor": factor, **figures.to_json(), "median_token_error": errors})
    return rows


def cases(massive: Sequence[str], down: Sequence[str], whole: bool) -> dict[str, fp8.Policy]:
    """Return the cases by name: only some layers in FP8, whose gaps have little noise; with `whole` also the model in
    tensorwise with these layers in other recipes."""

    def only(recipe: str, names: Sequence[str]) -> fp8.Policy:
        return fp8.Policy("off", rules=tuple(fp8.Rule(name, recipe=recipe) for name in names))

    others = [name for name in down if name not in massive][-len(massive) :]  # those with the fewest small values
    parts = {
        "only massive, tensorwise": only("tensorwise", massive),
        "only massive, rowwise": only("rowwise", massive),
        "only as many other down_proj, tensorwise": only("tensorwise", others),
        "only massive, blockwise": only("blockwise", massive),
        "only massive, delayed": only("delayed", massive),
    }
    if not whole:
        return parts
    return parts | {
        "tensorwise": fp8.Policy("tensorwise"),
        **{
            f"tensorwise, massive {recipe}": fp8.Policy(
                "tensorwise", rules=tuple(fp8.Rule(name, recipe=recipe) for name in massive)
            )
            for recipe in ("off", "rowwise", "blockwise")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("text", type=Path, help="held-out rows {text}")
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--whole", action="store_true", help="also the whole model in tensorwise, four cases")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=160, soft_wrap=True)
    rows = read_rows(args.model, args.text, args.rows, args.length)
    model = load(args.model, None, rows[0])
    with watch_inputs(model, fp8.plan(model, "tensorwise")) as watch, torch.no_grad():
        model(input_ids=rows[:1])
    inputs = dict(sorted(watch.statistics().items(), key=lambda item: -item[1].under_one_scale))
    massive = [*find_massive(inputs)]
    down = [name for name in inputs if name.endswith("down_proj")]
    console.print("massive: " + ", ".join(f"{name} ({inputs[name].ratio:.0f} times RMS)" for name in massive))
    # Cases take a quarter of a minute each: an earlier call with the same rows has some of them.
    earlier = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    if (earlier.get("rows"), earlier.get("length")) != (args.rows, args.length):
        earlier = {"cases": {}}
    captured = layer_inputs(model, rows[1], [*massive, down[-1]])
    record = {
        "rows": args.rows,
        "length": args.length,
        "massive": massive,
        "inputs": {name: one.to_json() for name, one in inputs.items()},
        "amplified": {name: amplify(model.get_submodule(name), x) for name, x in captured.items()},
        "loss": earlier.get("loss"),
        "cases": earlier["cases"],
    }
    console.print(record["amplified"])
    missing = {name: one for name, one in cases(massive, down, args.whole).items() if name not in record["cases"]}
    if missing:
        base, reference = token_losses(model, rows), gradients(model, rows[1])
        record["loss"] = base.mean().item()
    for name, policy in missing.items():
        began = time.process_time()
        model = load(args.model, policy, rows[0])
        record["cases"][name] = compare(model, rows, base, reference, massive) | {
            "cpu_seconds": time.process_time() - began
        }
        console.print(name, record["cases"][name])
        write(args.json, record)
    write(args.json, record)


def compare(
    model: nn.Module, rows: Tensor, base: Tensor, reference: dict[str, Tensor], massive: Sequence[str]
) -> dict[str, object]:
    """Return the gap of a case's loss to `base` by token, and the cosines of its gradients with `reference`."""
    excess = token_losses(model, rows) - base
    grads = gradients(model, rows[1])
    cosine = {
        n: float(nn.functional.cosine_similarity(g.flatten(), reference[n].flatten(), 0)) for n, g in grads.items()
    }
    return {
        "gap_percent": 100 * float(excess.mean() / base.mean()),
        "standard_error_percent": 100 * float(excess.std() / len(excess) ** 0.5 / base.mean()),
        "cosine_mean": statistics.fmean(cosine.values()),
        "cosine_massive": [cosine[f"{layer}.weight"] for layer in massive],
    }


def write(file: Path | None, record: dict[str, object]) -> None:
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
