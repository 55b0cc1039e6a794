"""``moe``: forward and backward of an expert layer, compared with the grouped BF16 experts of transformers."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig, Qwen3MoeConfig

from octavo import fp8, models
from octavo.bench import peers
from octavo.bench.bench import Bench, Call, Rotation, Unavailable, Work

TOKENS, FEW = 8192, 24


def run(bench: Bench) -> None:
    """Measure the experts of Qwen3-30B-A3B: 128 experts, 8 per token, hidden size 2048, inner size 768."""
    config = _config(bench.small)
    experts, active = config.num_experts, config.num_experts_per_tok
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    m = bench.tokens or (FEW if bench.small else TOKENS)
    candidates = {
        f"{bench.high} {how}": partial(_make_call, bench, config, m, how, None) for how in ("grouped_mm", "eager")
    }
    for recipe in peers.RECIPES:
        for backend in _grouped_backends(bench, recipe):
            candidates[f"{recipe} {backend}"] = partial(_make_call, bench, config, m, "eager", (recipe, backend))
    # gate and up are 2 I outputs, down H: 3 H I products a pair, three GEMMs, two operations each
    flops = 2.0 * 3 * m * active * 3 * hidden * inner
    case = f"{experts} experts, {active} a token, H={hidden} I={inner} M={m} fwd+bwd"
    bench.case("moe", case, f"{bench.high} grouped_mm", candidates, Work(flops=flops), memory=True)


def _config(small: bool) -> PreTrainedConfig:
    size = (
        {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        if small
        else {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    )
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32} if small else {}
    settings = {"num_hidden_layers": 1, "vocab_size": 256, "intermediate_size": 64, **size, **heads}
    return Qwen3MoeConfig.from_dict(settings)


def _grouped_backends(bench: Bench, recipe: str) -> list[str]:
    built = fp8.recipe(recipe)
    ops = ("grouped_fwd", "grouped_dgrad", "grouped_wgrad")
    return [
        name
        for name in peers.supported_backends(bench, recipe)
        if not any(fp8.kernels.get(name).supports(op, built, bench.device, None) for op in ops)
    ]


def _make_call(bench: Bench, config: PreTrainedConfig, m: int, how: str, ours: tuple[str, str] | None) -> Call:
    model = models.random_model(config, bench.device, bench.dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(how)
    elif how != "eager":
        raise Unavailable("this transformers has no interface for experts")
    if ours is not None:
        fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=ours[0], backend=ours[1])))
    layer = next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))
    return _make_training_call(bench, layer, config, m)


def _make_training_call(bench: Bench, layer: nn.Module, config: PreTrainedConfig, m: int) -> Call:
    experts, active, hidden = config.num_experts, config.num_experts_per_tok, config.hidden_size

    def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen = torch.rand(m, experts, device=bench.device).topk(active).indices
        weights = torch.full((m, active), 1 / active, device=bench.device, dtype=bench.dtype)
        return bench.randn(m, hidden, grad=True), chosen, weights

    inputs = Rotation(make)
    dy = bench.randn(m, hidden)
    parameters = list(layer.parameters())

    def call() -> None:
        x, chosen, weights = inputs()
        torch.autograd.grad(layer(x, chosen, weights), [x, *parameters], dy)

    return call
