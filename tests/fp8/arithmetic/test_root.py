"""The square root is correctly rounded with and without NumPy, at any position in the array."""

import pytest
import torch

from octavo.fp8.arithmetic import moments, root
from octavo.fp8.arithmetic.adamw import Hyper, Piece, Scalars, reference_step
from octavo.fp8.optim import cpu


@pytest.fixture(params=["with NumPy", "without"])
def way(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr(root, "_import_numpy", lambda: None)


def values():
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(0, 0x7F800000, (100_000,), generator=generator, dtype=torch.int32).view(torch.float32)
    ends = torch.tensor([0.0, 1e-45, 2.0**-126, 1.0, 3.4028234e38, float("inf"), float("nan")])
    return torch.cat([torch.rand(100_000, generator=generator) + 0.1, spread, ends])


def test_sqrt_is_correctly_rounded(way):
    x = values()
    exact = x.double().sqrt().float()
    assert torch.equal(root.sqrt(x).nan_to_num(-1), exact.nan_to_num(-1))
    for cut in (slice(1, None), slice(3, 70), slice(5, 6)):  # where a vector begins elsewhere
        assert torch.equal(root.sqrt(x[cut]).nan_to_num(-1), exact[cut].nan_to_num(-1))
    out = torch.empty(2, 500)
    assert root.sqrt(x[:1000].view(2, 500), out) is out
    assert torch.equal(out.flatten(), exact[:1000])
    in_place = x[:1000].clone()
    root.sqrt(in_place, in_place)
    assert torch.equal(in_place, exact[:1000])
    assert root.sqrt(torch.tensor(2.0)).shape == () and root.sqrt(x[:0]).shape == (0,)


def test_adamw_step_uses_this_sqrt(monkeypatch):
    """torch's square root, which is sometimes off by one unit in the last place, is never called."""

    def refused(*args, **kwargs):
        raise AssertionError("a root that is not rounded exactly")

    for name in ("sqrt", "sqrt_", "rsqrt", "rsqrt_"):
        monkeypatch.setattr(torch.Tensor, name, refused)
        monkeypatch.setattr(torch, name, refused)
    m, v = torch.randn(2, 128), torch.rand(2, 128)
    for states in ("fp8", "coat"):
        state = moments.encode(states, m, v, torch.zeros(2, 128, dtype=torch.int32))
        moments.decode(states, state)
    for states in ("fp8", "bf16"):
        state = {
            k.name: torch.zeros((256,) if k.row is None else (2, *k.row), dtype=k.dtype) for k in moments.LAYOUT[states]
        }
        piece = Piece(torch.randn(256), torch.randn(256), state, 0, 0, 1)
        reference_step([piece], Hyper(1e-3, states=states), None, None)
        cpu.run([(piece, Scalars.compute(Hyper(1e-3), 1), 0, 256)], Hyper(1e-3, states=states), None)
