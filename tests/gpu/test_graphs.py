"""`train.cuda_graphs` on a GPU: replays equal eager micro-batches bit for bit, and use the current weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("pydantic")  # these three packages configure runs and read rows
pytest.importorskip("ruamel.yaml")
pytest.importorskip("pyarrow")

from octavo import fp8, models
from octavo.fp8.kernels import CudaGraph
from octavo.train.step.cuda_graphs import CudaGraphs
from octavo.train.step.update import Loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TOKENS = 257


class Meta:
    sees, lengths = False, (TOKENS,)


def trained(recipe: str, graphs: bool, steps: int = 5) -> tuple[list[Any], dict[Any, int], CudaGraphs, list[str]]:
    """Return (losses of each micro-batch, counts, graphs, logged lines) of two micro-batches per step."""
    torch.manual_seed(0)
    model = models.random_model(models.tiny_config("qwen3"), "cuda", torch.bfloat16, 2).train()
    fp8.apply(model, fp8.plan(model, recipe, models.describe(model).components))
    optimizer = fp8.AdamW(model.parameters(), lr=1e-3)
    lines: list[str] = []

    def loss_at(given: dict[str, Any], keep: Tensor, target: Tensor, weight: Tensor) -> Loss:
        logits = model(input_ids=given["input_ids"], logits_to_keep=keep, use_cache=False).logits.float()
        each = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        loss = (each.view(target.shape) * weight).sum()
        return Loss(loss, torch.stack([loss, torch.zeros_like(loss)]).detach())

    results = CudaGraphs(model, torch.device("cuda"), loss_at, lines.append)
    losses = []
    with fp8.count_gemms() as counts:
        for step in range(steps):
            for micro in range(2):
                ids = torch.randint(0, 200, (1, TOKENS), generator=torch.Generator().manual_seed(2 * step + micro))
                keep, weight = torch.arange(TOKENS - 1), torch.full((1, TOKENS - 1), 1 / (2 * TOKENS))
                given = {"input_ids": ids, "meta": Meta()}
                parts = results.run(given, keep, ids[:, 1:], weight) if graphs else None
                if parts is None:
                    on = [t.cuda() for t in (keep, ids[:, 1:], weight)]
                    with models.disable_masks(model):
                        loss = loss_at({"input_ids": ids.cuda(), "meta": Meta()}, *on)
                    loss.total.backward()
                    parts = loss.parts
                    del loss  # a graph that is still alive adds its gradients on the stream it ran on
                losses.append(parts.clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return [x.tolist() for x in losses], dict(counts.calls), results, lines


def test_failed_capture_gives_reason_and_cleans_up() -> None:
    torch.cuda.manual_seed(5)
    expected = [torch.randn(3, device="cuda") for _ in range(2)][1]
    torch.cuda.manual_seed(5)
    torch.randn(3, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError, match="capturing"):
        CudaGraph(pool).capture(lambda: torch.randn(3, device="cuda").cpu())  # a synchronizing copy
    assert torch.equal(torch.randn(3, device="cuda"), expected)
    again, x = CudaGraph(pool), torch.ones(3, device="cuda")
    out = again.capture(lambda: x * 2)
    again.replay()
    assert out.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "rowwise"])
def test_replays_equal_eager_micro_batches(recipe: str) -> None:
    without, counts, _, _ = trained(recipe, False)
    losses, replayed, results, lines = trained(recipe, True)
    assert lines == [] and results.replays == 9
    assert losses == without and without[0] != without[-1]
    assert replayed == counts
