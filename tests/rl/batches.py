"""Random micro-batches of completions, as objectives take them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.rl.objectives.policy_losses import Batch


def masks(b: int, t: int, seed: int = 0) -> Tensor:
    """bool [B, T]: completions of 1 to T tokens, padded on the right."""
    lengths = torch.randint(1, t + 1, (b,), generator=torch.Generator().manual_seed(seed))
    return torch.arange(t) < lengths[:, None]


def batch(b: int = 6, t: int = 7, seed: int = 0, spread: float = 0.3, mask: Tensor | None = None, **fields) -> Batch:
    """Return completions whose log-probabilities differ by about `spread` nats between policy, rollout and
    reference."""
    g = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return spread * torch.randn(b, t, generator=g)

    old = -torch.rand(b, t, generator=g) * 3 - 0.1
    defaults = {
        "logps": old + noise(),
        "old_logps": old,
        "mask": masks(b, t, seed) if mask is None else mask,
        "advantages": torch.randn(b, generator=g),
        "ref_logps": old + noise(),
        "entropy": torch.rand(b, t, generator=g) * 2,
    }
    return Batch(**(defaults | fields))


def close(actual: Tensor, expected: Tensor | float) -> None:
    """Assert equality within an absolute or relative error of 1e-6."""
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected).double(), rtol=1e-6, atol=1e-6)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(True)
