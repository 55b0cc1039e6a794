"""Optimizer states moved between a GPU and the host, and agreement between ranks without synchronization."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.tensor
from torch import nn

from octavo.fp8.optim import convert, sharded
from octavo.fp8.optim.adamw import AdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SHAPES = [(5, 60), (3,), (2, 128), (7, 40)]


def _optimizer(states: str, master: str, device: str) -> AdamW:
    gen = torch.Generator().manual_seed(0)
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    params = [nn.Parameter(torch.randn(shape, generator=gen).to(device, dtype)) for shape in SHAPES]
    return AdamW(params, lr=1e-2, states=states, master=master)


def _grads(optimizer: AdamW, step: int) -> None:
    gen = torch.Generator().manual_seed(step)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape, generator=gen).to(p.device, p.dtype)


def _states(optimizer: AdamW) -> list[dict]:
    return [
        {k: v.detach().cpu().reshape(-1).view(torch.uint8).tolist() for k, v in optimizer.state[p].items()}
        for p in optimizer.param_groups[0]["params"]
    ]


@pytest.mark.parametrize("states", ["fp8", "coat", "bf16", "fp32"])
@pytest.mark.parametrize("master", ["fp32", "bf16+16", "bf16+sr"])
def test_state_dict_round_trip_is_exact(states, master):
    host, gpu, back = (_optimizer(states, master, device) for device in ("cpu", "cuda", "cpu"))
    _grads(host, 1)
    host.step()
    gpu.load_state_dict(host.state_dict())
    assert {v.device.type for s in gpu.state.values() for k, v in s.items() if k != "step"} == {"cuda"}
    back.load_state_dict(gpu.state_dict())
    assert _states(gpu) == _states(host) == _states(back)


@pytest.mark.parametrize("states", ["fp8", "coat", "bf16", "fp32"])
def test_moments_are_encoded_equally_on_both_devices(states):
    torchs = torch.optim.AdamW([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    _grads(torchs, 2)
    torchs.step()
    host, gpu = (_optimizer(states, "bf16+16", device) for device in ("cpu", "cuda"))
    host.load_state_dict(torchs.state_dict())
    gpu.load_state_dict(torchs.state_dict())
    assert _states(host) == _states(gpu)
    for actual, expected in zip(
        convert.to_torch(host)["state"].values(), convert.to_torch(gpu)["state"].values(), strict=True
    ):
        assert all(torch.equal(actual[key], expected[key].cpu()) for key in actual)


@pytest.mark.parametrize("master", ["fp32", "bf16+16", "bf16+sr"])
@pytest.mark.parametrize("states", ["fp8", "coat", "bf16", "fp32"])
def test_resume_is_exact_on_both_devices(states, master, tmp_path):
    """GPU, file, GPU: the bits of a run without a stop. GPU, file, CPU: near it, since square roots and powers of CPUs
    are not those of GPUs in every last bit."""
    full, stopped, again = (_optimizer(states, master, "cuda") for _ in range(3))
    host = _optimizer(states, master, "cpu")
    for step in range(1, 5):
        for optimizer in (full, stopped) if step < 3 else (full, again, host):
            _grads(optimizer, step)
            optimizer.step(factor=torch.tensor(0.5, device=optimizer.param_groups[0]["params"][0].device))
        if step == 2:
            torch.save(stopped.state_dict(), tmp_path / "states.pt")
            saved = torch.load(tmp_path / "states.pt", map_location="cpu")
            for optimizer in (again, host):
                optimizer.load_state_dict(saved)
                for p, q in zip(optimizer.param_groups[0]["params"], stopped.param_groups[0]["params"], strict=True):
                    p.data.copy_(q.data)
    assert _states(again) == _states(full)
    weights = [[p.detach().cpu().float() for p in o.param_groups[0]["params"]] for o in (full, again, host)]
    for a, b, c in zip(*weights, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, a, rtol=1e-2, atol=1e-4)


class _Mesh:
    """Two ranks, of which the other one's marks are always smaller."""

    ndim = 1

    def size(self, dim: int) -> int:
        return 2

    def get_group(self, dim: int) -> str:
        return "both"


def test_agreement_does_not_synchronize(monkeypatch):
    p = nn.Parameter(torch.zeros(7, 40, device="cuda"))
    p.device_mesh, p.placements = _Mesh(), (torch.distributed.tensor.Shard(0),)
    monkeypatch.setattr(sharded, "is_dtensor", lambda value: True)
    recorded = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, op, group: recorded.append((tuple(t.shape), group)))
    assert sharded.cut_groups(p) == (1,)
    marks = torch.tensor([[-5, -7, -9], [5, 7, 9]], dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        agree = sharded.Agreement([(p, 0)], [(0, 1), (0, 2), (1, 1)], marks.device)
        agreed = agree(marks)
        agree(marks[1:])
        agree.finish("fp8")  # nothing is left to do
        sharded.Agreement([(p, 0)], [], marks.device).finish("coat")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert recorded == [((2, 1), "both"), ((1, 1), "both"), ((4, 1), "both")]
    assert torch.equal(agreed, marks)
