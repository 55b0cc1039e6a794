"""`model.attention`: the kernel that is asked for, or the fastest that works; what cannot be says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from octavo import models, train
from octavo.checkpoint.run_state.files import read_state
from octavo.fp8.blocks import grouped_attention
from octavo.fp8.measuring import time_calls
from octavo.models.attention import attention as registry
from octavo.models.attention import kernel_choice
from octavo.models.attention.kernel_choice import Heads, check_kernel, choose
from octavo.parallel import World
from octavo.train.forward import attention_kernel
from octavo.train.forward.attention_kernel import decide
from octavo.train.run_dir import run_dir

pytestmark = pytest.mark.usefixtures("bare_forward")

CPU = torch.device("cpu")
TEXT, TOWER = Heads("language model", 4, 2, 16, 32, True), Heads("vision tower", 3, 3, 24, 32, False)


def test_cpu_uses_the_first_kernel_that_works() -> None:
    found = choose("auto", (TEXT, TOWER), CPU, time_calls)
    assert found is not None and found.kernel == "flash" and list(found.rejected) == ["cudnn", "efficient", "math"]
    assert "No viable backend" in found.rejected["cudnn"] and "language model, 4 heads of 16 over 2" in str(found)
    assert choose("sdpa", (TEXT,), CPU, time_calls) is None
    named = choose("math", (TEXT,), CPU, time_calls)
    assert "T x T weights" in str(named) and "T x T" not in str(found)


@pytest.mark.parametrize("name", ["cudnn", "efficient", "flash_attention_2", "flash_attention_3", "flex"])
def test_a_kernel_by_name_that_cannot_run_is_refused(name: str) -> None:
    with pytest.raises(models.ModelError, match=rf"model\.attention: {name} cannot run on cpu: {name}: lang"):
        choose(name, (TEXT,), CPU, time_calls)


def test_gpu_uses_the_fastest_kernel_over_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that a clock of ours times; one of them cannot do the tower."""
    seconds = {
        ("cudnn", 4): 1.0,
        ("cudnn", 3): 4.0,
        ("flash", 4): 2.0,
        ("flash", 3): 2.0,
        ("math", 4): 0.1,
        ("math", 3): 0.1,
    }

    def tried(name: str, part: Heads, device: torch.device) -> Any:
        if (name, part.heads) not in seconds:
            raise RuntimeError(f"{part}: it has other sizes")
        return lambda: seconds[name, part.heads]

    def checked(name: str, part: Heads, device: torch.device) -> None:
        if name == "math":
            raise RuntimeError(f"{part}: its error is above the tolerance")

    def timer(calls: dict[str, Any], device: torch.device) -> dict[str, Any]:
        return {name: SimpleNamespace(device=call()) for name, call in calls.items()}

    monkeypatch.setattr(kernel_choice, "_try_kernel", tried)
    monkeypatch.setattr(kernel_choice, "check_kernel", checked)
    seconds["efficient", 4] = 0.1
    found = choose("auto", (TEXT, TOWER), torch.device("cuda"), timer)
    assert found is not None and (found.kernel, found.why[:35]) == ("flash", "the fastest here (4000.000 ms forwa")
    assert found.rejected["cudnn"] == "5000.000 ms" and "vision tower" in found.rejected["efficient"]
    assert "above the tolerance" in found.rejected["math"], "the fastest, but wrong"


def test_kernel_with_twice_the_error_of_bf16_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """On BF16 inputs, against fp32. The planted kernels are right in the output and wrong in one gradient, or NaN."""
    for name in ("flash", "math"):
        for part in (TEXT, TOWER):
            check_kernel(name, part, CPU)
    real = kernel_choice.attend
    monkeypatch.setattr(kernel_choice, "attend", lambda n, q, k, v, c: real(n, q, k, v + 0.02 * (v - v.detach()), c))
    with pytest.raises(RuntimeError, match="model, 4 heads .*: its error of dv is 0.02[0-9]* of the values, more"):
        check_kernel("flash", TEXT, CPU)
    monkeypatch.setattr(kernel_choice, "attend", lambda n, q, k, v, c: real(n, q, k, v, c) * float("nan"))
    with pytest.raises(RuntimeError, match="its error of y is nan"):
        check_kernel("flash", TEXT, CPU)


def test_attention_calls_use_the_requested_kernel(place, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every part, forward and where blocks run again, with gradient and without; beside attention of our own too."""
    asked: list[list[SDPBackend]] = []
    within = registry.sdpa_kernel
    monkeypatch.setattr(registry, "sdpa_kernel", lambda them, **way: asked.append(list(them)) or within(them, **way))
    model = models.load(place / "text").train()
    ids = torch.arange(24)[None]
    stock = model(ids).logits
    models.use_kernel(model, "math")
    plain = model(ids).logits
    layers = model.config.num_hidden_layers
    assert asked == [[SDPBackend.MATH]] * layers
    assert not torch.equal(plain, stock) and torch.allclose(plain, stock, atol=1e-4), "the kernel made no difference"
    models.use_attention(model, _grouped)
    with torch.no_grad():
        model(ids)
    model(ids)
    assert asked == [[SDPBackend.MATH]] * 3 * layers
    first, *others = registry.KERNELS.values()
    with registry.prefer_kernel("cudnn"):
        pass
    assert asked[-1] == [first, *others]


def _grouped(q, k, v, mask, *, scale, is_causal, dropout):
    return grouped_attention(q, k, v, mask, scale=scale, is_causal=is_causal, dropout=dropout)


def test_run_reports_and_keeps_its_attention_kernel(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` on a CPU is the kernel that torch chooses, so losses are equal; the run that goes on asks nobody again."""
    over = ("train.steps=2", "train.warmup=0", "run.save_every=1", "run.keep=9", "data.eval=[]")
    plain = train.run(make(*over, dir="plain"))
    first = train.run(make(*over, "model.attention=auto", dir="auto"))
    assert first.losses() == plain.losses()
    notes = run_dir.read_json(first.dir / "plan.json")["notes"]
    assert any(note.startswith("attention by flash, the first that works") for note in notes)
    saved = first.dir / "checkpoints" / "step_1"
    assert read_state(saved)["counters"]["attention"] == "flash"
    monkeypatch.setattr(attention_kernel, "choose", lambda *_: pytest.fail("a run that goes on chose anew"))
    again = train.run(make(*over, "model.attention=auto", f"run.resume={saved}", dir="again"))
    assert again.losses() == {2: plain.losses()[2]}
    assert str(decide(make("model.attention=auto"), World(), "cudnn")[0]) == "attention by cudnn, as this run began"


def test_components_have_separate_attention_kernels(make, place, monkeypatch: pytest.MonkeyPatch) -> None:
    over = ("train.steps=2", "train.warmup=0", "run.save_every=1", "run.keep=9", "data.eval=[]")
    each = "model.attention={image_encoder: math, foundation: auto}"
    first = train.run(make(*over, each, dir="each"))
    notes = run_dir.read_json(first.dir / "plan.json")["notes"]
    assert any(note.startswith("attention of image_encoder by math, as requested") for note in notes)
    assert any(note.startswith("attention of foundation by flash, the first that works") for note in notes)
    saved = first.dir / "checkpoints" / "step_1"
    assert read_state(saved)["counters"]["attention"] == {"foundation": "flash", "image_encoder": "math"}
    again = train.run(make(*over, each, f"run.resume={saved}", dir="again"))
    assert again.losses() == {2: first.losses()[2]}
    with pytest.raises(train.TrainError, match="this model has no image_encoder. Use model.attention: auto"):
        train.run(make(*over, each, f"model.path={place / 'text'}", dir="text"))
    with pytest.raises(train.TrainError, match="varlen cannot run on cpu: varlen: vision tower.* needs CUDA, a 16-bit"):
        train.run(make(*over, "model.attention={image_encoder: varlen}", dir="varlen"))
