"""Measures the error of an FP8 head at equal weights: losses and gradients on the batches of a trained run, by recipe.

    python benchmarks/head.py runs/my                 # a finished run of octavo train, on its device
    python benchmarks/head.py runs/my --batches 16

The model of the run computes hidden states of its own training data; the head then computes losses in high precision
and in each recipe (``fp8.lm_head``). Losses are paired token by token: the mean difference with 1.96 standard errors,
next to the mean loss. Gradients of the mean loss by hidden states and by the weight are compared with calc_diff. The
effect on training needs a trial (``octavo compare`` of a configuration with ``fp8.lm_head``).
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from octavo import data, fp8, train
from octavo.base.recipe_specs import CANDIDATES
from octavo.fp8.memory import ChunkedHead, chunk_head
from octavo.fp8.metrics import calc_diff

IGNORE = -100


class Head(nn.Module):
    """A model that is its head."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(weight.detach().clone())

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(input_ids))


def hidden_of(directory: str, batches: int) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states [1, P, H] at positions with a target, targets [1, P], the head's weight)."""
    model, processor, cfg = train.load_run(directory)
    loader, pairs = data.train_loader(cfg, processor), []
    head, device = model.get_output_embeddings(), next(model.parameters()).device
    inputs: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        for step in loader:
            for batch in step:
                model(**{k: v.to(device) for k, v in batch.items() if isinstance(v, Tensor) and k != "labels"})
                target = batch["labels"][:, 1:].to(device)
                known = target != IGNORE
                pairs.append((inputs.pop()[:, :-1][known], target[known]))
            if len(pairs) >= batches:
                break
    handle.remove()
    loader.close()
    h, target = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return h[None], target[None], head.weight


def judged(recipe: str | None, h: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(losses [P], dh, dw of their mean)."""
    model = Head(weight)
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, fp8.Policy(recipe="off", components={"lm_head": {"recipe": recipe}})))
    head = chunk_head(model)
    assert isinstance(head, ChunkedHead), head
    h = h.clone().requires_grad_()
    with head.losses(target) as losses:
        each = losses.checked_losses(model(h).logits)
    return each.detach()[0], *torch.autograd.grad(each.mean(), [h, model.lm_head.weight])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a finished run")
    parser.add_argument("--batches", type=int, default=8, help="micro-batches to judge")
    args = parser.parse_args()
    h, target, weight = hidden_of(args.run, args.batches)
    exact, dh, dw = judged(None, h, target, weight)
    print(f"{target.numel()} tokens, head {tuple(weight.shape)}, mean loss {exact.mean():.4f} in high precision")
    for recipe in CANDIDATES:
        each, *gradients = judged(recipe, h, target, weight)
        gap = (each - exact).double()
        error = 1.96 * gap.std() / len(gap) ** 0.5
        diffs = [calc_diff(got, want) for got, want in zip(gradients, (dh, dw), strict=True)]
        print(
            f"{recipe:10}  loss {gap.mean():+.2e} +- {error:.1e}  calc_diff of dh {diffs[0]:.1e}, of dw {diffs[1]:.1e}"
        )


if __name__ == "__main__":
    main()
