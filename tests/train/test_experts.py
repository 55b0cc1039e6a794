"""Runs whose experts are dealt to ranks: losses, checkpoints and hf/ of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import train
from octavo.config import Config
from octavo.models.tiny import tiny
from octavo.train.run_dir.run_dir import read_rows
from tests import ranks
from tests.rl.forks import both

pytestmark = [pytest.mark.long, pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")]
FIGURES = "loss", "grad_norm", "aux_loss", "expert_load_max", "experts_idle"


@pytest.fixture
def moe(make: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """make() of a mini Qwen3-VL-MoE, a row a micro-batch."""
    folder = tiny.write("qwen3_vl_moe", tmp_path / "moe", size="mini")
    over = (f"model.path={folder}", "train.micro_batch=1", "run.save_every=2", "run.keep=9", "run.hf=true")
    return lambda *more, dir="run": make(*over, *more, dir=dir)


def _figures(cfg: Config, name: str = "loss") -> list[float]:
    return [row[name] for row in read_rows(Path(cfg.run.dir) / "metrics.jsonl")]


def _ranks(cfg: Config, size: int = 2) -> None:
    for code, said in both(cfg, size=size):
        assert code == 0, said


def _hf(cfg: Config) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (Path(cfg.run.dir) / "hf").iterdir()}


def test_two_ranks_train_as_one_and_are_continued_by_one(moe: Callable[..., Config]):
    """In FP8, with the proof of every GEMM."""
    over = ("train.steps=3", "optimizer.states=fp8", "data.eval=[]", "fp8.param=true")
    one, two = moe(*over, dir="one"), moe(*over, "parallel.expert=2", dir="two")
    train.run(one)
    _ranks(two)
    for name in FIGURES:
        assert _figures(two, name) == pytest.approx(_figures(one, name), rel=1e-4), name
    after = moe(*over, f"run.resume={two.run.dir}/checkpoints/step_2", dir="after")
    assert list(train.run(after).losses().values()) == pytest.approx(_figures(two)[2:], rel=1e-4)


@pytest.mark.usefixtures("bare_forward")
def test_checkpoints_load_on_any_ranks_and_hf_is_the_same_bytes(moe: Callable[..., Config]):
    """Packs, whose rows two ranks share, and experts dealt to two, on four ranks."""
    over = ("data.eval=[]", "train.steps=4", "data.packing=true")
    one, four = moe(*over, dir="one"), moe(*over, "parallel.expert=2", "parallel.context=2", dir="four")
    train.run(one)
    _ranks(four, 4)
    for name in FIGURES:
        assert _figures(four, name) == pytest.approx(_figures(one, name), rel=1e-3), name
    middle = f"run.resume={four.run.dir}/checkpoints/step_2"
    for size, expert in ((1, 1), (2, 1), (2, 2)):
        cfg = moe(*over, middle, f"parallel.expert={expert}", dir=f"{size}_{expert}")
        _ranks(cfg, size)
        assert _figures(cfg) == pytest.approx(_figures(four)[2:], rel=1e-3), (size, expert)
    wanted = _hf(four)
    for size, expert in ((1, 1), (2, 2)):  # nothing is left to train: the same weights are written again
        cfg = moe(*over, f"run.resume={four.run.dir}/checkpoints/step_4", f"parallel.expert={expert}", dir=f"hf_{size}")
        _ranks(cfg, size)
        assert _hf(cfg) == wanted


@pytest.mark.usefixtures("bare_forward")
@pytest.mark.parametrize(
    "more",
    [
        ("fp8.recipe=off", "train.recompute=selective"),
        ("fp8.recipe=rowwise", "train.recompute=full", "optimizer.master=bf16+16", "optimizer.states=coat"),
        ("optimizer.update=backward", "optimizer.states=fp8", "train.micro_batch=2", "train.global_batch=4"),
        ("model.init=random", "train.precision=bf16", "optimizer.master=bf16+sr", "optimizer.states=fp8"),
    ],
    ids=["high precision", "halves", "in backward", "random"],
)
def test_other_settings_train_as_without(moe: Callable[..., Config], more: tuple[str, ...]):
    """Against the same ranks whose experts are sharded alone: both round gradients of BF16 parameters alike."""
    over = (*more, "data.eval=[]", "train.steps=3", "run.hf=false")
    gathered, dealt = moe(*over, dir="gathered"), moe(*over, "parallel.expert=2", dir="dealt")
    _ranks(gathered)
    _ranks(dealt)
    assert _figures(dealt) == pytest.approx(_figures(gathered), rel=3e-3)


@pytest.mark.usefixtures("bare_forward")
def test_rows_and_outputs_that_go_as_codes_begin_with_the_same_loss(moe: Callable[..., Config]):
    """Two ranks share rows and experts. Forward and dgrad are those of values to the bit, and wgrad is but for values
    that underflow in one cast and not in the other."""
    over = ("data.packing=true", "train.steps=3", "data.eval=[]", "run.hf=false", "fp8.recipe=mxfp8")
    axes = "parallel={context: 2, ulysses: 2, expert: 2}"
    stored, coded = (moe(*over, axes, f"train.exchange={how}", dir=how) for how in ("stored", "fp8"))
    _ranks(stored)
    _ranks(coded)
    assert _figures(coded)[0] == _figures(stored)[0]
    assert _figures(coded) == pytest.approx(_figures(stored), rel=1e-5)
    alone = train.run(moe(*over, "train.exchange=fp8", dir="alone"))
    assert _figures(coded) == pytest.approx(list(alone.losses().values()), rel=3e-3)
