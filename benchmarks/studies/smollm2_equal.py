"""Tasks of the study `smollm2` that train nothing: what FP8 costs at equal weights, by recipe and by layer.

Each makes the losses of held-out windows, more of them until the paired standard error is small enough, and the
gradient of one micro-batch compared with the gradient in high precision.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import smollm2_text as text
import torch
from torch import nn

from octavo import fp8, models, train

Figures = dict[str, object]

ENOUGH = 0.001  # standard error of the mean gap, as a share of the loss
CHUNK = 24  # windows between two looks at the standard error
AT_LEAST, AT_MOST = 48, 192  # windows
HIGH = "equal-high"
MLP, ATTENTION = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")


def high(home: Path) -> Figures:
    """Losses of all windows in high precision: the other side of every gap."""
    return {"losses": text.losses(_model(), 0, AT_MOST)}


def bf16(home: Path) -> Figures:
    """The model in BF16, without FP8."""
    return _compare(home, _model().bfloat16(), AT_LEAST)


def recipe(home: Path, name: str) -> Figures:
    """A recipe in all linear layers, until the standard error is at most ENOUGH."""
    model = _model()
    plan = fp8.plan(model, name)
    fp8.apply(model, plan)
    if name == "delayed":  # its scales come from a history, which a first micro-batch begins
        _gradients(model)
    return {**_compare(home, model, AT_MOST), "layers": sum(row.fp8 for row in plan.rows)}


def head(home: Path, name: str) -> Figures:
    """A recipe in the output head only."""
    model = _model()
    policy = fp8.Policy("off", components={"lm_head": fp8.ComponentPolicy(recipe=name)})
    fp8.apply(model, fp8.plan(model, policy, models.describe(model).components))
    return {**_compare(home, model, AT_LEAST), "layers": 1}


def torchao(home: Path, name: str) -> Figures:
    """torchao's float8 training, emulated, on the same weights."""
    import torchao

    model = _model()
    convert_to_torchao(model, name)
    return {**_compare(home, model, AT_MOST), "version": torchao.__version__}


def plant_torchao(run: train.Run, name: str) -> None:
    convert_to_torchao(run.model, name)


def convert_to_torchao(model: nn.Module, name: str) -> None:
    """Convert the linear layers of a model in place, all but the output head, as Octavo's plan does."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)


def operands(home: Path, name: str, what: str) -> Figures:
    """Only weights, activations or gradients rounded, by the blocks of a recipe ("one cast": of its x for fwd too)."""
    import smollm2_operands

    model = _model()
    casts = smollm2_operands.one_cast() if name == "one cast" else fp8.recipe(name)
    smollm2_operands.apply(model, casts, what)
    return _compare(home, model, AT_LEAST)


def noise(home: Path, name: str) -> Figures:
    """No FP8: the weights times normal noise as large as the rounding of a recipe's weights."""
    model, spec = _model(), fp8.recipe(name).fwd.b  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    relative = []
    with torch.no_grad():
        for name_of, p in model.named_parameters():
            if p.dim() == 2 and ".layers." in name_of:
                error = float((fp8.dequantize(fp8.quantize(p, spec)) - p).norm() / p.norm())
                relative.append(error)
                p.mul_(1 + error * torch.randn(p.shape, generator=generator))
    return {**_compare(home, model, AT_LEAST), "relative_error": float(np.mean(relative))}


def update(home: Path, name: str, size: float) -> Figures:
    """A recipe after every weight moved by `size` along the sign of its gradient: what a first update does that is too
    small to matter in high precision. A weight in the middle between two FP8 values takes the one that it moves to."""
    model, spec = _model(), fp8.recipe(name).fwd.b  # type: ignore[union-attr]
    ties = _ties(model, spec)
    fp8.apply(model, fp8.plan(model, name))
    signs = {name: gradient.sign() for name, gradient in _gradients(model).items()}
    with torch.no_grad():
        for name_of, p in model.named_parameters():
            if name_of in signs:
                p.add_(signs[name_of], alpha=size)
    fp8.invalidate(model)
    with fp8.high_precision(model):
        high = text.losses(model, 0, AT_LEAST)
    return {"losses": text.losses(model, 0, AT_LEAST), "ties": ties, "high": high}


@torch.no_grad()
def _ties(model: nn.Module, spec: fp8.CastSpec) -> float:
    """The share of weights in the middle between two FP8 values: they round elsewhere after the smallest change."""
    count = total = 0
    for name, p in model.named_parameters():
        if p.dim() == 2 and ".layers." in name:
            above, below = (fp8.dequantize(fp8.quantize(p * (1 + change), spec)) for change in (1e-6, -1e-6))
            count += int((above != below).sum())
            total += p.numel()
    return count / total


def layers(home: Path, name: str, globs: list[str], gemms: list[str]) -> Figures:
    """FP8 only in the layers that match, and only in these GEMMs."""
    model = _model()
    off = {gemm: "bf16" for gemm in ("fwd", "dgrad", "wgrad") if gemm not in gemms}
    policy = fp8.Policy(recipe="off", rules=tuple(fp8.Rule(glob, recipe=name, **off) for glob in globs))
    plan = fp8.plan(model, policy)
    fp8.apply(model, plan)
    count = sum(row.fp8 for row in plan.rows)
    # Without an FP8 forward only the gradient differs from high precision.
    return {**_compare(home, model, AT_LEAST if "fwd" in gemms else 0), "layers": count}


def summarize(figures: Figures, reference: list[float]) -> dict[str, float]:
    """The gap of a task as a share of the loss, and its standard error over windows."""
    losses = np.array(figures["losses"])
    base = np.array(reference[: len(losses)])
    gaps = losses - base
    error = float(gaps.std(ddof=1)) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return {"gap": float(gaps.mean() / base.mean()), "error": error / float(base.mean()), "windows": len(losses)}


def _model() -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(text.MODEL, dtype=torch.float32)


def _compare(home: Path, model: nn.Module, most: int) -> Figures:
    from units import DONE, UNITS

    figures = _compare_gradients(model)
    file = home / UNITS / HIGH / DONE
    if not file.is_file():
        file = ARCHIVE / f"{HIGH}.json"
    reference = json.loads(file.read_text("utf-8"))["more"]["losses"]
    losses: list[float] = []
    while len(losses) < most:
        losses += text.losses(model, len(losses), len(losses) + CHUNK)
        if len(losses) >= AT_LEAST and summarize({"losses": losses}, reference)["error"] <= ENOUGH:
            break
    return {"losses": losses, **figures}


def _compare_gradients(model: nn.Module) -> Figures:
    """Relative error and cosines of the gradient of one micro-batch, over the linear layers of the decoder."""
    gradients, exact = _gradients(model), _gradients(_model())
    cosines = {
        name: float(torch.nn.functional.cosine_similarity(gradients[name].flatten(), exact[name].flatten(), 0))
        for name in exact
    }
    error = sum(float((gradients[name] - exact[name]).square().sum()) for name in exact)
    norm = sum(float(exact[name].square().sum()) for name in exact)
    lowest = sorted(cosines, key=cosines.__getitem__)[:4]
    return {
        "gradient_error": math.sqrt(error / norm),
        "cosine": float(np.mean(list(cosines.values()))),
        "lowest_cosines": {name: cosines[name] for name in lowest},
    }


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    ids = text.windows()[-text.BATCH :]
    model.train()
    model.zero_grad()
    logits = model(input_ids=ids).logits[:, :-1].float()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {
        name: p.grad.float().clone() for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name
    }
    model.zero_grad()
    return gradients


ARCHIVE = Path(__file__).resolve().parents[1] / "results" / "smollm2_units"
