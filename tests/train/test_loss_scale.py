"""`train.precision: fp16`: what the loss scale does to steps, and that it does nothing to what they learn."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo import fp8, models, train
from octavo.config import Config, override
from octavo.fp8.delayed import scale_gradient_histories
from octavo.parallel import World
from octavo.report.trial.runs import high_precision_config
from octavo.train import artifacts
from octavo.train.errors import TrainError
from octavo.train.forward.forward import autocast_dtype
from octavo.train.loop import loop
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.step import loss_scale, step
from octavo.train.step.loss_scale import LossScale
from octavo.train.step.update import AfterBackward, InBackward, Loss

from ..rl.forks import both

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")


@pytest.fixture
def text(make: Callable[..., Config], place: Path, tmp_path: Path) -> Callable[..., Config]:
    """text("train.steps=3", ..., dir="a") -> a configuration of six short steps of mini Qwen3 in FP16."""
    turns = [{"from": "human", "value": "Count to nine."}, {"from": "gpt", "value": "1 2 3 4 5 6 7 8 9"}]
    (tmp_path / "talk.json").write_text(json.dumps([{"conversations": turns}] * 8))
    of = (f"model.path={place / 'text'}", f"data.train=[{{path: {tmp_path / 'talk.json'}}}]", "data.eval=[]")
    return lambda *over, dir="run": make(*of, "train.precision=fp16", *over, dir=dir)


class Overflows(train.Callback):
    """Stands for gradients of a few steps that are too large for FP16: one of them is, on its way back, by `factor`."""

    def __init__(self, *steps: int, factor: float = 1e5) -> None:
        self.steps, self.factor, self.dtypes, self.weights = steps, factor, set[torch.dtype](), list[Tensor]()

    def begin(self, run: train.Run) -> None:
        layer = next(m for name, m in run.model.named_modules() if name.endswith("layers.1.mlp.down_proj"))

        def larger(gradient: Tensor) -> Tensor | None:
            self.dtypes.add(gradient.dtype)
            if self.steps and run.job.stepper.step_number not in self.steps:
                return None
            return gradient * self.factor

        layer.register_forward_hook(lambda module, given, out: out.register_hook(larger) and None)

    def after_step(self, run: train.Run, step: train.Step) -> None:
        self.weights.append(next(run.model.parameters()).detach().clone())


def rows_of(cfg: Config) -> list[dict[str, Any]]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_the_rule_is_that_of_torchs_grad_scaler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    p = nn.Parameter(torch.ones(1))
    optimizer, theirs, ours = torch.optim.SGD([p], lr=0.0), torch.amp.GradScaler("cpu", growth_interval=3), LossScale()
    overflows = [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0]
    for bad in overflows:
        p.grad = torch.full((1,), math.inf if bad else 1.0)
        theirs.scale(torch.zeros(()))
        theirs.step(optimizer)
        theirs.update()
        assert ours.record_step(not bad, True) == bool(bad)
        assert ours.value == theirs.get_scale()
    assert loss_scale.START == torch.amp.GradScaler("cpu").get_scale() == 65536


def test_loss_scale_does_not_change_at_one_or_for_a_nonfinite_loss():
    scale = LossScale(2.0)
    assert not scale.record_step(False, loss_finite=False) and scale.value == 2, "no scale mends a loss"
    assert scale.record_step(False, True) and scale.value == 1
    assert not scale.record_step(False, True) and scale.value == 1, "a step like any that is not finite"
    fixed = LossScale(1024.0, is_dynamic=False)
    assert not fixed.record_step(False, True) and fixed.value == 1024


def test_a_scale_that_no_run_wrote_is_refused():
    scale = LossScale()
    for value, good in ((3.0, 0), (0.5, 0), (0.0, 0), (65536.0, 2000)):
        with pytest.raises(TrainError, match="step_4 has the loss scale .*a power of two from 1"):
            scale.load({"value": value, "good": good}, "step_4")
    scale.load({"value": 2.0**20, "good": 1999}, "step_4")
    assert not scale.record_step(True, True) and (scale.value, scale.good) == (2.0**21, 0)


def test_loss_scale_exists_only_for_fp16(text):
    assert LossScale.of(text("train.precision=bf16")) is None
    assert LossScale.of(text()) == LossScale.of(text("train.loss_scale=dynamic")) == LossScale(65536.0)
    assert LossScale.of(text("train.loss_scale=1024")) == LossScale(1024.0, is_dynamic=False)
    assert {autocast_dtype(text(), torch.device(d)) for d in ("cpu", "cuda")} == {torch.float16}
    assert high_precision_config(text("train.loss_scale=1024")).train == text("train.loss_scale=1024").train


# --- what it does to gradients ----------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def tiny_loss(model: nn.Module, dtype: torch.dtype | None) -> Loss:
    """A mean over very many tokens, as it were, of which these are a few."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = (model(x).float().square().sum(1) * 1e-9).sum()
    return Loss(loss, torch.stack([loss, torch.zeros_like(loss)]).detach())


def gradients(dtype: torch.dtype | None, scale: LossScale | None) -> list[Tensor]:
    model = small()
    update = AfterBackward(torch.optim.AdamW(model.parameters(), fused=True), model, 0.0, World(), scale=scale)
    update.backward(tiny_loss(model, dtype))
    update.step()  # which divides them
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_loss_scale_prevents_fp16_underflow():
    exact = gradients(None, None)
    assert all(float(g.abs().max()) > 1e-10 for g in exact)
    assert all(not g.any() for g in gradients(torch.float16, None)[:2]), "of the first layer nothing is left"
    for own, want in zip(gradients(torch.float16, LossScale(2.0**28)), exact, strict=True):
        assert own.dtype == torch.float32
        assert float((own - want).norm() / want.norm()) < 4 * 2**-11, "a few roundings to 11 bits"
    for own, want in zip(gradients(torch.bfloat16, None), exact, strict=True):
        assert float((own - want).norm() / want.norm()) < 4 * 2**-8, "BF16 loses bits, and no gradient"


@pytest.mark.parametrize("clip", [0.0, 1e-9])
@pytest.mark.parametrize("way", ["torch", "fp8", "backward"])
def test_a_scaled_step_in_fp32_is_the_plain_one_bit_for_bit(way: str, clip: float):
    found = []
    for scale in (None, LossScale(2.0**20)):
        model, done = small(), []
        if way == "torch":
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-12, fused=True)
        else:
            optimizer = fp8.AdamW(model.parameters(), lr=1e-2, eps=1e-12, states="fp8")
        kind = InBackward if way == "backward" else AfterBackward
        update = kind(optimizer, model, clip, World(), scale=scale)
        for _ in range(3):
            update.backward(tiny_loss(model, None))
            done.append(update.step())
            optimizer.zero_grad()
        assert all(one.applied for one in done)
        found.append(([float(one.norm) for one in done], [p.detach().clone() for p in model.parameters()]))
    (norms, plain), (others, scaled) = found
    assert norms == others and norms[0] > clip
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("low", [torch.float32, torch.float16])
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_no_fp8_code_depends_on_a_scale_that_is_a_power_of_two(recipe: str, low: torch.dtype):
    """With scales of any fp32 value too: amax / 448 and x / scale are divisions, and powers of two go through them."""
    torch.manual_seed(0)
    dy = (torch.randn(160, 96) * torch.randn(160, 1).exp() / 64).to(low)
    dgrad, wgrad = fp8.recipe(recipe).dgrad, fp8.recipe(recipe).wgrad
    assert dgrad is not None and wgrad is not None
    for spec in (dgrad.a, wgrad.a):
        plain, scaled = fp8.quantize(dy, spec), fp8.quantize(dy * 512, spec)
        assert torch.equal(plain.data.view(torch.uint8), scaled.data.view(torch.uint8))
        assert torch.equal(plain.scale.float() * 512, scaled.scale.float())
    found = []
    for factors in ((1, 1, 1), (512, 1024, 64)):  # as a scale that moves; delayed scaling remembers the step before
        torch.manual_seed(1)
        layer = nn.Sequential(nn.Linear(128, 96))
        fp8.apply(layer, fp8.plan(layer, recipe))
        for number, factor in enumerate(factors):
            x = torch.randn(160, 128, requires_grad=True)
            with torch.autocast("cpu", dtype=low, enabled=low != torch.float32):
                y = layer(x)
            dw, db, dx = torch.autograd.grad(y, [*layer.parameters(), x], dy * (1.7**number) * factor)
            normal = dx.abs() >= (2**-14 if low == torch.float16 else 0)  # below, FP16 itself rounds otherwise
            found.append([dw / factor, db / factor, dx / factor, normal])
            after = factors[(number + 1) % 3]
            scale_gradient_histories(layer, after / factor)
    for (*weights, dx, normal), (*scaled, other, _) in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, scaled, strict=True)) and normal.float().mean() > 0.9
        assert torch.equal(dx[normal], other[normal])


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_health_of_scaled_gradients_is_that_of_plain_ones(recipe: str):
    torch.manual_seed(0)
    layer, x, dy = nn.Sequential(nn.Linear(128, 96)), torch.randn(160, 128), torch.randn(160, 96) ** 9
    fp8.apply(layer, fp8.plan(layer, recipe))
    tables = []
    for factor in (1, 2**20):
        with fp8.health() as found:
            layer(x.clone().requires_grad_()).backward(dy * factor)
        tables.append(found.table())
    assert tables[0] == tables[1] and tables[0]["0"]["dy"]["underflow"] > 0


# --- runs -------------------------------------------------------------------------------------------------------------


def test_an_overflow_halves_the_scale_and_training_goes_on(text):
    cfg, planted, said = text("run.log_every=4"), Overflows(3), []

    class Says(train.Callback):
        def begin(self, run: train.Run) -> None:
            run.display.log = said.append  # type: ignore[method-assign]

    result = train.run(cfg, callbacks=[Says(), planted])
    rows = {row["step"]: row for row in rows_of(cfg)}
    assert planted.dtypes == {torch.float16}
    assert {n: row["loss_scale"] for n, row in rows.items()} == {1: 65536, 3: 65536, 4: 32768, 6: 32768}
    assert rows[3]["overflow"] and "skipped" not in rows[3] and math.isfinite(rows[3]["loss"])
    assert rows[3]["grad_norm"] is None and rows[4]["grad_norm"] < 100, "of gradients that are not scaled any more"
    assert (result.status, result.skipped, result.overflowed) == ("finished", 0, 1)
    before, skipped, after = planted.weights[1:4]
    assert torch.equal(before, skipped) and not torch.equal(skipped, after)
    assert any("step 3 skipped: gradients overflowed FP16 at a loss scale of 65536; the next step uses 32768" in line
               for line in said)  # fmt: skip


def test_a_run_whose_last_step_overflows_has_finished(text):
    cfg = text("train.steps=2", "train.warmup=0", "run.hf=true", "train.loss_scale=dynamic")
    result = train.run(cfg, callbacks=[Overflows(2)])
    assert (result.status, result.final["overflow"]) == ("finished", True)
    model = models.load(Path(cfg.run.dir) / "hf")
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(("over", "steps"), [("train.loss_scale=1024", 10), ("train.loss_scale=dynamic", 12)])
def test_run_ends_if_no_loss_scale_prevents_overflow(text, monkeypatch, over, steps):
    """Dynamic: from 4 to 2 and 1, then ten steps that are as dead as they look."""
    monkeypatch.setattr(LossScale, "of", classmethod(_from_four))
    cfg = text(over, "train.steps=20", "fp8.recipe=off")
    about = "multiplied by 1024 .*lower it" if "1024" in over else "has no values beyond 65504.*use train.precision"
    with pytest.raises(TrainError, match=f"10 steps in a row, up to step {steps}, .*layers.1.mlp.*{about}"):
        train.run(cfg, callbacks=[Overflows(factor=math.inf)])
    kinds = ["overflow" if "overflow" in row else "skipped" for row in rows_of(cfg)]
    assert kinds == ["overflow"] * (steps - 10) + ["skipped"] * 10


def _from_four(cls: type[LossScale], cfg: Config) -> LossScale:
    return cls(4.0) if cfg.train.loss_scale == "dynamic" else cls(1024.0, is_dynamic=False)


@pytest.mark.parametrize("recipe", ["blockwise", pytest.param("delayed", marks=pytest.mark.long)])
def test_resumed_run_restores_the_loss_scale(text, monkeypatch, recipe: str):
    """Stopped one step before the scale would double for the second time, after an overflow."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 2)
    over = (f"fp8.recipe={recipe}", "train.steps=7")
    whole, cfg = text(*over, dir="whole"), text(*over)
    train.run(whole, callbacks=[Overflows(3)])

    class Stops(train.Callback):
        def end_step(self, run: train.Run, step: train.Step) -> None:
            if step.number == 4:
                run.stop()

    assert train.run(cfg, callbacks=[Overflows(3), Stops()]).status == "stopped"
    train.run(override(cfg, ["run.resume=auto"]), callbacks=[Overflows(3)])
    told = [[(row["loss"], row["grad_norm"], row["loss_scale"]) for row in rows_of(one)] for one in (whole, cfg)]
    assert told[0] == told[1]
    assert [row["loss_scale"] / 65536 for row in rows_of(whole)] == [1, 1, 2, 1, 1, 2, 2]


def test_a_fixed_scale_learns_what_a_dynamic_one_learns(text):
    """But for what is subnormal in FP16 under the smaller of the two."""
    found = [list(train.run(text(f"train.loss_scale={s}", "train.steps=3", dir=str(s))).losses().values())
             for s in (4096, "dynamic")]  # fmt: skip
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.long
@pytest.mark.usefixtures("torch_products")
def test_fp16_trains_near_fp32_and_is_evaluated_in_fp16(make, monkeypatch):
    """With images, and evaluated from its directory as it computed: the same loss to the last bit."""
    over, seen = ("train.steps=4", "train.warmup=0"), set[torch.dtype]()
    run = artifacts.evaluate.Forward.__call__

    def watched(self: Any, *more: Any) -> Tensor:
        seen.add(self.autocast)
        return run(self, *more)

    exact = train.run(make(*over, dir="fp32"))
    low = train.run(make(*over, "train.precision=fp16", dir="fp16"))
    monkeypatch.setattr(artifacts.evaluate.Forward, "__call__", watched)
    judged = artifacts.evaluate_target(artifacts.inspect_target(low.dir))
    assert list(low.losses().values()) == pytest.approx(list(exact.losses().values()), rel=5e-3)
    assert judged["loss"] == low.eval["loss"] and seen == {torch.float16}


@pytest.mark.long
@pytest.mark.parametrize("more", [("train.recompute=full", "fp8.activations=fp8"), ("optimizer.update=backward",
    "train.micro_batch=4", "optimizer.states=fp8"), ("fp8.lm_head={recipe: blockwise}",),
    ("fp8.param=true", "data.packing=true", "train.micro_batch=1")])  # fmt: skip
def test_fp16_works_with_memory_savings(text, more: tuple[str, ...]):
    """An overflow in step 3, beside each: the scale falls once, and losses stay near those of fp32."""
    low = list(train.run(text(*more, dir="fp16"), callbacks=[Overflows(3)]).losses().values())
    exact = list(train.run(text(*more, "train.precision=fp32", "train.steps=3", dir="fp32")).losses().values())
    assert low[:3] == pytest.approx(exact, rel=1e-2) and low[-1] < low[0]
    assert [row["loss_scale"] for row in rows_of(text(dir="fp16"))] == [65536.0] * 3 + [32768.0] * 3


@pytest.mark.long
def test_compiled_blocks_compute_in_fp16(text, graphs):
    low = train.run(text("train.compile=true", "train.steps=4", dir="compiled")).losses()
    assert graphs and low == train.run(text("train.steps=4", dir="eager")).losses()
    assert {row["loss_scale"] for row in rows_of(text(dir="compiled"))} == {65536.0}


@pytest.mark.long
def test_an_overflow_on_one_rank_is_skipped_on_both(text, monkeypatch):
    """Two ranks; in step 3 the gradients of rank 1 alone are too large. As one process whose gradients were."""
    alone = text("fp8.recipe=rowwise", "train.micro_batch=1", "train.global_batch=2", dir="alone")
    train.run(alone, callbacks=[Overflows(3)])
    shared = override(alone, [f"run.dir={Path(alone.run.dir).parent / 'shared'}"])
    begin = loop._ordered_callbacks

    def plant(rank: int) -> None:
        def with_it(*given: Any) -> Any:
            planted = Overflows(3)
            if rank == 1:
                monkeypatch.setattr(step.Stepper, "run", _with(planted, step.Stepper.run))
            return begin(*given)

        loop._ordered_callbacks = with_it  # in a process of its own

    ended = both(shared, plant)
    assert [code for code, _ in ended] == [0, 0], ended
    rows, want = rows_of(shared), rows_of(alone)
    assert [row["loss_scale"] for row in rows] == [row["loss_scale"] for row in want] == [65536] * 3 + [32768] * 3
    assert [row.get("overflow") for row in rows] == [None, None, True, None, None, None]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in want], rel=3e-3)


def _with(planted: Overflows, run: Any) -> Any:
    """A step before the first of which the hook is there."""

    def with_hook(self: Any, *more: Any) -> Any:
        if not planted.dtypes:
            planted.begin(_Run(self))
        return run(self, *more)

    return with_hook


class _Run:
    """What `Overflows` asks of a run."""

    def __init__(self, stepper: Any) -> None:
        self.model, self.job = stepper.model, self
        self.stepper = stepper
