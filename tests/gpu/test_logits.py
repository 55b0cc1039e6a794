"""The loss without logits on a GPU: accuracy, synchronization and peak memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import fp8
from octavo.fp8.memory import chunk_head
from octavo.fp8.memory.chunked_loss import linear_cross_entropy, token_log_probs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

IGNORE = -100


def problem(m: int, k: int, v: int, dtype: torch.dtype, ignored: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(m, k, device="cuda").to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(v, k, device="cuda")).to(dtype).requires_grad_()
    target = torch.randint(0, v, (m,))
    target[torch.randperm(m)[:ignored]] = IGNORE
    return hidden, weight, target


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, target.cuda(), reduction="none")


def relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("m, k, v", [(300, 896, 32_001), (1, 64, 999), (0, 64, 999), (1024, 512, 151_936)])
def test_error_is_at_most_that_of_plain_path(m: int, k: int, v: int, dtype: torch.dtype, where: str):
    hidden, weight, target = problem(m, k, v, dtype, ignored=m // 3)
    each = torch.rand(m, device="cuda")
    actual, full = linear_cross_entropy(hidden, weight, target.to(where)), plain(hidden, weight, target)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    true = plain(*exact, target)
    got, low = (torch.autograd.grad((x * each).sum(), (hidden, weight)) for x in (actual, full))
    want = torch.autograd.grad((true * each).sum(), exact)
    if not m:
        assert actual.shape == (0,) and not got[1].any()
        return
    assert relative_error(actual, true) <= 1.05 * relative_error(full, true) + 1e-6
    for a, b, c in zip(got, low, want, strict=True):
        assert a.dtype == dtype and relative_error(a, c) <= 1.05 * relative_error(b, c) + 1e-5


@pytest.mark.parametrize("m, v", [(300, 32_001), (0, 1000), (1, 999)])
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_fp8_head_is_close_to_logits(recipe: str, m: int, v: int):
    """At most four times what FP8 costs with full logits: scales along the vocabulary are those of a block."""
    hidden, weight, target = problem(m, 512, v, torch.bfloat16)
    model = HeadAlone(nn.Linear(512, v, bias=False, device="cuda", dtype=torch.bfloat16))
    model.lm_head.weight = nn.Parameter(weight.detach())
    fp8.apply(model, fp8.plan(model, fp8.Policy(recipe="off", components={"lm_head": {"recipe": recipe}})))
    full = F.cross_entropy(model(hidden[None]).logits[0].float(), target.cuda(), reduction="none")
    head = chunk_head(model)
    with head.losses(target[None], chunk=64) as inputs:
        actual = inputs.checked_losses(model(hidden[None]).logits)[0]
    got, low = (torch.autograd.grad(x.sum(), (hidden, model.lm_head.weight)) for x in (actual, full))
    if not m:
        assert actual.shape == (0,) and not got[1].any()
        return
    exact = plain(hidden, weight, target)
    want = torch.autograd.grad(exact.sum(), (hidden, weight))
    for a, b, c in zip((actual, *got), (full, *low), (exact, *want), strict=True):
        assert bool(a.isfinite().all()) and relative_error(a, c) <= 4 * relative_error(b, c) + 1e-5


class HeadAlone(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.lm_head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(input_ids))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_no_synchronization(where: str):
    hidden, weight, target = problem(256, 64, 5000, torch.bfloat16, ignored=50)
    target = target.to(where)
    linear_cross_entropy(hidden, weight, target).sum().backward()  # cuBLAS and the allocator have started
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, z_loss=1e-4).sum().backward()
        sum(x.sum() for x in token_log_probs(hidden, weight, target, entropy=True)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bad_target_makes_loss_nan():
    hidden, weight, target = problem(8, 64, 500, torch.float32)
    target[3] = 500
    loss = linear_cross_entropy(hidden, weight, target.cuda())
    assert loss[3].isnan() and loss.isnan().sum() == 1


def test_autocast_casts_blocks_and_not_the_weight():
    hidden, weight, target = problem(512, 256, 151_936, torch.float32)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    want = torch.autograd.grad(plain(*exact, target).sum(), exact)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        full = torch.autograd.grad(plain(hidden, weight, target).sum(), (hidden, weight))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual = torch.autograd.grad(linear_cross_entropy(hidden, weight, target).sum(), (hidden, weight))
    for a, b, c in zip(actual, full, want, strict=True):
        assert a.dtype == torch.float32 and relative_error(a, c) <= 1.05 * relative_error(b, c)


def test_peak_memory_is_fraction_of_logits():
    hidden, weight, target = problem(8192, 1024, 151_936, torch.bfloat16)

    def peak(loss) -> int:
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(hidden, weight, target).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    logits = 8192 * 151_936 * 4
    needed = weight.numel() * 2 + hidden.numel() * 6  # the gradients, and dh in fp32
    assert peak(linear_cross_entropy) < needed + 0.15 * logits
    assert peak(plain) > 2 * logits
