"""Bytes on the wire: what is predicted, beside what the collectives of real runs bring to a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import parallel
from octavo.fp8 import moe
from octavo.models.tiny import tiny
from octavo.train.estimate import step_time
from octavo.train.estimate.memory import MemoryEstimator
from octavo.train.setup import planning
from octavo.train.setup.token_counts import Tokens
from octavo.train.step.step import Stepper
from tests import ranks
from tests.rl.forks import both

pytestmark = pytest.mark.usefixtures("uncounted")


def count(rank: int) -> None:
    """Count the collectives of every step of this process; `counted` reads the last step."""
    run_step, plan_dispatch = Stepper.run, moe.Exchange.plan_dispatch
    rows: list[list[int]] = []  # rows from other ranks to local experts, and results of other ranks' experts

    def record_dispatch(self: moe.Exchange, *args: Any) -> Any:
        dispatch = plan_dispatch(self, *args)
        local = torch.distributed.get_rank(self.group)
        rows.append([sum(counts) - counts[local] for counts in (dispatch.received, dispatch.sent)])
        return dispatch

    def run(self: Stepper, batches: Any, *rest: Any) -> Any:
        rows.clear()
        with parallel.CommCounter() as counter:
            result = run_step(self, batches, *rest)
        file = Path(self.cfg.run.dir).parent / f"counted_{rank}.json"
        lengths = sorted({batch["input_ids"].numel() for batch in batches})
        file.write_text(json.dumps([counter.bytes, len(batches), lengths, [sum(n) for n in zip(*rows, strict=True)]]))
        return result

    Stepper.run, moe.Exchange.plan_dispatch = run, record_dispatch  # type: ignore[method-assign]


def counted(cfg: Any, size: int) -> list[dict[str, int]]:
    """Collective -> bytes of a step, of each rank; they are those of a micro-batch as predicted, times their number."""
    ended = both(cfg, count, size)
    assert [code for code, _ in ended] == [0] * size, ended[0][1]
    model, family = planning.meta_model(cfg)
    plan, _, _ = planning.plan_model(cfg, model, family, size)
    tokens = json.loads((Path(cfg.run.dir).parent / "counted_0.json").read_text())[2]
    assert len(tokens) == 1 or cfg.parallel.context == 1
    counts = dict.fromkeys(family.components, 0) | {"foundation": tokens[0]}
    sizes = MemoryEstimator(cfg, model, family, plan, Tokens(counts, tokens[0], 0), device="cpu")
    work = step_time.estimate_work(sizes, cfg)
    layout = parallel.Layout.from_section(size, cfg.parallel)
    mesh = step_time.Mesh.from_layout(layout, cfg.parallel.ulysses, work.decoder.heads)
    moved = step_time.total_bytes(work.groups(layout), work.decoder, work.rows, mesh, work.two_backwards)
    out = []
    for rank in range(size):
        found, batches, _, rows = json.loads((Path(cfg.run.dir).parent / f"counted_{rank}.json").read_text())
        out.append(parallel.predicted_collectives(found))
        # What moves to experts and back depends on what tokens choose; each of these rows once more in backward.
        exact = {kind: batches * n for kind, n in moved.items() if kind not in ("dispatch", "combine")}
        if rows:
            forwards = 1 + work.rows.recomputed_experts  # backward has each row once, however often it was sent
            width, layers = work.rows.width, work.decoder.sparse
            there, back = (of(layers, width) / layers for of in (work.decoder.rows, work.decoder.gradients))
            come, gone = (n // forwards * work.decoder.hidden for n in rows)
            exact["dispatch"] = come * (there * forwards + back) + gone * width * (forwards + 1)
        assert out[-1] == step_time.by_collective(exact)
    return out


SHORT = ("train.steps=1", "train.warmup=0", "train.micro_batch=1", "data.eval=[]", "run.resume=never")


@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
@pytest.mark.parametrize(
    ("over", "collectives"),
    [
        (("fp8.param=true",), {"all_gather", "reduce_scatter"}),
        pytest.param(("parallel.replicate=2", "train.global_batch=2"), {"all_reduce"}, marks=pytest.mark.long),
    ],
    ids=["fsdp", "hsdp"],
)
def test_two_ranks_move_what_is_predicted(make, over: tuple[str, ...], collectives: set[str]) -> None:
    """To the byte, padding of shards and scales of codes included, on both ranks."""
    assert all(set(found) == collectives for found in counted(make(*SHORT, *over), 2))


@pytest.mark.long
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
@pytest.mark.parametrize(
    ("size", "over"),
    [
        (4, ("parallel.replicate=2", "fp8.param=true")),
        (3, ("train.gather=bf16", "train.global_batch=3")),
        (2, ("model.freeze=[image_encoder]", "train.recompute=full")),
        (2, ("fp8.recipe=rowwise", "lora.rank=4", "model.load_in_fp8=row")),
        (2, ("optimizer.update=backward", "optimizer.master=bf16+sr", "train.global_batch=2")),
    ],
    ids=["hsdp of codes", "bf16", "a frozen tower", "lora", "two backwards"],
)
def test_other_settings_move_what_is_predicted(make, size: int, over: tuple[str, ...]) -> None:
    counted(make(*SHORT, *over), size)


@pytest.mark.long
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
@pytest.mark.parametrize(
    ("size", "over"),
    [
        (2, ("parallel.expert=2", "fp8.param=true")),
        (4, ("parallel.expert=2", "parallel.replicate=2", "optimizer.master=bf16+sr")),
        (4, ("parallel.expert=2", "fp8.param=true", "train.recompute=selective")),
    ],
    ids=["two", "copies in bf16", "the rest of codes"],
)
def test_ranks_that_share_experts_move_what_is_predicted(
    make, tmp_path: Path, size: int, over: tuple[str, ...]
) -> None:
    folder = tiny.write("qwen3_vl_moe", tmp_path / "moe", size="mini")
    assert "all_to_all" in counted(make(*SHORT, f"model.path={folder}", *over), size)[0]


@pytest.fixture
def talk(tmp_path: Path) -> tuple[str, ...]:
    """Settings of packs of talk, without an image."""
    row = {"conversations": [{"from": "human", "value": "Say one."}, {"from": "gpt", "value": "1"}]}
    (tmp_path / "talk.json").write_text(json.dumps([row] * 64))
    data = (f"data.train=[{{path: {tmp_path / 'talk.json'}}}]", "data.packing=true", "train.seq_length=256")
    return (*data, "train.global_batch=2")


@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
def test_two_ranks_that_share_rows_move_heads(make, place: Path, talk: tuple[str, ...]) -> None:
    found = counted(make(*SHORT, *talk, f"model.path={place / 'text'}", "parallel.context=2"), 2)
    assert all(set(one) == {"all_gather", "reduce_scatter", "all_to_all"} for one in found)


@pytest.mark.long
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
@pytest.mark.parametrize(
    ("size", "over"),
    [
        (2, ("parallel.context=2", "parallel.ulysses=1", "optimizer.master=bf16+sr")),
        (2, ("parallel.context=2", "parallel.ulysses=1", "train.recompute=full")),
        (4, ("parallel.context=4", "parallel.ulysses=2", "train.seq_length=512")),
        (4, ("parallel.context=2", "parallel.replicate=2", "train.recompute=full", "fp8.param=true")),
    ],
    ids=["keys in bf16", "keys again", "heads and keys", "copies"],
)
def test_ranks_that_share_rows_move_what_is_predicted(
    make, place: Path, talk: tuple[str, ...], size: int, over: tuple[str, ...]
) -> None:
    counted(make(*SHORT, *talk, f"model.path={place / 'text'}", *over), size)


@pytest.mark.long
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
def test_ranks_that_share_rows_and_experts(make, tmp_path: Path, talk: tuple[str, ...]) -> None:
    folder = tiny.write("qwen3_vl_moe", tmp_path / "moe", size="mini")
    over = (*SHORT, *talk, f"model.path={folder}", "parallel.context=2", "parallel.expert=2")
    counted(make(*over, "train.recompute=full"), 4)
    way = {how: make(*over, "fp8.recipe=mxfp8", f"train.exchange={how}", dir=how) for how in ("stored", "fp8")}
    ways = [counted(cfg, 2) for cfg in way.values()]
    assert all(codes["all_to_all"] < 0.8 * plain["all_to_all"] for plain, codes in zip(*ways, strict=True))


def test_a_collective_without_a_rule_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="recv_any_source_"):
        parallel.CommCounter()._count("recv_any_source_", ())
