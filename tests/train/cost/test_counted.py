"""Bytes on the wire: what is predicted, beside what the collectives of real runs bring to a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import parallel
from octavo.models import tiny
from octavo.train import cost, planning
from octavo.train.memory_plan import Footprints
from octavo.train.step import Stepper
from octavo.train.tokens import Tokens
from tests import ranks
from tests.rl.forks import both


def count(rank: int) -> None:
    """Every step of this process is counted; the last one is what `counted` reads."""
    step = Stepper.run

    def run(self: Stepper, batches: Any, *rest: Any) -> Any:
        with parallel.Counted() as found:
            done = step(self, batches, *rest)
        here = Path(self.cfg.run.dir).parent / f"counted_{rank}.json"
        rows = sorted({batch["input_ids"].numel() for batch in batches})
        here.write_text(json.dumps([found.bytes, len(batches), rows]))
        return done

    Stepper.run = run  # type: ignore[method-assign]


def counted(cfg: Any, size: int, about: tuple[str, ...] = ()) -> list[dict[str, int]]:
    """Collective -> bytes of a step, of each rank; they are those of a micro-batch as predicted, times their number.
    ``about``: the collectives of which an expected value is predicted."""
    ended = both(cfg, count, size)
    assert [code for code, _ in ended] == [0] * size, ended[0][1]
    model, family = planning.model_of(cfg)
    plan, _, _ = planning.plan_model(cfg, model, family, size)
    tokens = json.loads((Path(cfg.run.dir).parent / "counted_0.json").read_text())[2]
    assert len(tokens) == 1 or cfg.parallel.context == 1
    counts = dict.fromkeys(family.components, 0) | {"foundation": tokens[0]}
    sizes = Footprints(cfg, model, family, plan, Tokens(counts, tokens[0], 0), device="cpu")
    work = cost.work_of(sizes, cfg)
    layout = parallel.Layout.of(size, **cfg.parallel.axes)
    mesh = cost.Mesh.of(layout, cfg.parallel.ulysses, work.decoder.heads)
    moved = cost.total(work.groups(layout), work.decoder, work.rows, mesh, work.twice)
    out = []
    for rank in range(size):
        found, batches, _ = json.loads((Path(cfg.run.dir).parent / f"counted_{rank}.json").read_text())
        out.append(parallel.by_collective(found))
        want = {name: batches * n for name, n in cost.by_collective(moved).items()}
        assert out[-1] == want | {name: pytest.approx(want[name], rel=0.25) for name in about}
    return out


SHORT = ("train.steps=1", "train.warmup=0", "train.micro_batch=1", "data.eval=[]", "run.resume=never")


@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
@pytest.mark.parametrize(
    ("over", "collectives"),
    [
        (("fp8.param=true",), {"all_gather", "reduce_scatter"}),
        (("parallel.replicate=2", "train.global_batch=2"), {"all_reduce"}),
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


@pytest.fixture
def talk(place: Path, tmp_path: Path) -> tuple[str, ...]:
    """Settings of the text model on packs of talk."""
    row = {"conversations": [{"from": "human", "value": "Say one."}, {"from": "gpt", "value": "1"}]}
    (tmp_path / "talk.json").write_text(json.dumps([row] * 64))
    data = (f"data.train=[{{path: {tmp_path / 'talk.json'}}}]", "data.packing=true", "train.seq_length=256")
    return (f"model.path={place / 'text'}", *data, "train.global_batch=2")


@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
def test_two_ranks_that_share_rows_move_heads(make, talk: tuple[str, ...]) -> None:
    found = counted(make(*SHORT, *talk, "parallel.context=2"), 2)
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
    make, talk: tuple[str, ...], size: int, over: tuple[str, ...]
) -> None:
    counted(make(*SHORT, *talk, *over), size)


@pytest.mark.long
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
def test_experts_that_are_dealt_out_are_not_gathered(make, tmp_path: Path) -> None:
    """Gathers and sums to the byte; how many rows go to the other rank is the routing's."""
    folder = tiny.write("qwen3_moe", tmp_path / "moe", size="mini")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{n} and {n + 1} are {2 * n + 1}. " * 8}) + "\n" for n in range(8)))
    over = (f"model.path={folder}", f"data.train=[{{path: {text}}}]", "train.phase=pretrain", "fp8.param=true")
    counted(make(*SHORT, *over, "parallel.expert=2", "train.recompute=full"), 2, about=("all_to_all",))


def test_a_collective_without_a_rule_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="recv_any_source_"):
        parallel.Counted()._count("recv_any_source_", ())
