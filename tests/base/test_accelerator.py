"""Properties of devices: those of the CPU, and the accelerator that a process uses.

That of a device of another vendor is in tests/device.
"""

from __future__ import annotations

import pytest
import torch

from octavo.base import accelerator
from octavo.parallel import WorldError, world

CPU, OTHER = torch.device("cpu"), torch.device("privateuseone")


def test_cpu_reports_missing_abilities():
    """Nothing is 0 that was not counted."""
    assert accelerator.autocast_dtype(CPU) is None and accelerator.rng_state(CPU) is None
    figures = (accelerator.peak_bytes, accelerator.allocated_bytes, accelerator.requested_bytes, accelerator.free_bytes)
    assert [figure(CPU) for figure in figures] == [None] * 4
    assert accelerator.why_no_streams(CPU) == "cpu has no separate memory" and accelerator.stream_id(CPU) == 0
    assert not accelerator.empty_pinned((3,), torch.uint8, CPU).is_pinned()
    assert accelerator.pin_in_place(torch.empty(3), CPU) is None
    for does_nothing in (accelerator.synchronize, accelerator.empty_cache, accelerator.empty_cache_and_reset_peak):
        does_nothing(CPU)
    has = {name for name, found in accelerator.list_abilities(CPU).items() if found}
    assert has == {"FP8 dtypes", "float64", "collectives"}


@pytest.mark.parametrize(
    ("found", "variable", "taken"),
    [
        (None, None, "cpu"), ("cuda", None, "cuda"), ("cuda", "cpu", "cpu"), ("cuda", "cuda", "cuda"),
        ("mps", None, "cpu"), ("mps", "mps", "mps"),
    ],
)  # fmt: skip
def test_default_device(found, variable, taken, monkeypatch):
    """torch's accelerator where it holds FP8; the variable names another. There is no MPS here: it holds nothing."""
    monkeypatch.setattr(accelerator, "detect", lambda: None if found is None else torch.device(found))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    if variable is not None:
        monkeypatch.setenv(accelerator.VARIABLE, variable)
    assert accelerator.default_device() == torch.device(taken) and accelerator.device_count() == (
        0 if taken == "cpu" else 2
    )


def test_missing_device_raises(monkeypatch):
    monkeypatch.setenv(accelerator.VARIABLE, "npu")
    with pytest.raises(accelerator.DeviceError, match="OCTAVO_DEVICE=npu, but torch sees no accelerator here"):
        accelerator.default_device()
    with pytest.raises(WorldError, match="OCTAVO_DEVICE=npu"):
        world.setup()
    assert "does not support float8_e4m3fn and float8_e5m2; set OCTAVO_DEVICE=mps to use it" in accelerator.why_unused(
        torch.device("mps")
    )


def test_collective_backend_comes_from_torch():
    assert (world._backend(CPU), world._backend(torch.device("cuda"))) == ("gloo", "cpu:gloo,cuda:nccl")
    assert world._backend(torch.device("xpu")) == "cpu:gloo,xpu:xccl"
    with pytest.raises(
        WorldError, match="this torch has no backend for collectives between devices of type privateuseone"
    ):
        world._backend(OTHER)


def test_amd_gpu_has_no_compute_capability(monkeypatch):
    """Its numbers would read as Hopper's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert accelerator.compute_capability(torch.device("cuda")) == (9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert accelerator.compute_capability(torch.device("cuda")) is None is accelerator.compute_capability(CPU)


def test_move_keeps_tied_weights_tied(monkeypatch):
    """`to` would make a parameter for each module."""
    monkeypatch.setattr(accelerator, "accepts_parameter_data", lambda device: False)
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = weight = first.weight
    moved = accelerator.move(torch.nn.Sequential(first, second), torch.device("meta"))
    assert moved[0].weight is moved[1].weight is weight and weight.is_meta
    assert not torch.__future__.get_swap_module_params_on_conversion()
