"""Runs whose ranks share the tokens of packs: the losses of one process, in high precision and in FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import parallel, train
from octavo.config import Config, ConfigError, load_config_text
from octavo.models.tiny import tiny
from octavo.parallel import World
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup import planning
from octavo.train.setup.token_counts import Tokens, attention_flops
from tests import ranks

pytestmark = pytest.mark.usefixtures("bare_forward")

PACKED = (
    "data.packing=true", "data.window=16", "train.micro_batch=1", "train.global_batch=2", "train.seq_length=384",
    "train.steps=3", "train.warmup=0",
)  # fmt: skip


def run_on(world: World, texts: list[str]) -> list[Any]:
    """Runs one after the other in the processes that there are."""
    parallel.setup = lambda *args, **axes: world
    World.close = lambda self: None
    return [train.run(load_config_text(text)).eval for text in texts]


def text_of(cfg: Config) -> str:
    return json.dumps(cfg.model_dump(mode="json", exclude_none=True, exclude_unset=True))


def rows(cfg: Config) -> list[dict[str, Any]]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")


@pytest.fixture
def mixed(make, tmp_path: Path):
    """mixed(...) -> a configuration of packs of images and of talk of all lengths."""
    talk = [
        {"conversations": [{"from": "human", "value": "Say it. " * (1 + n % 4)}, {"from": "gpt", "value": f"{n} " * n}]}
        for n in range(1, 13)
    ]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    images = make().data.train[0].path

    def build(*overrides: str, dir: str = "run") -> Config:
        both = f"data.train=[{{path: {images}, max_samples: 20}}, {{path: {tmp_path / 'talk.json'}}}]"
        return make(both, *PACKED, *overrides, dir=dir)

    return build


def test_two_ranks_share_packs_as_one_process_trains_and_one_goes_on(mixed):
    held_out = f"data.eval=[{{path: {mixed().data.eval[0].path}, max_samples: 3}}]"
    plain = ("fp8.recipe=off", "train.loss=sample", "run.save_every=1", "train.steps=2", held_out)
    one, two = mixed(*plain, dir="one"), mixed(*plain, "parallel.context=2", dir="two")
    whole = train.run(one)
    first, second = ranks.run(run_on, 2, [text_of(two)], context=2)
    alone, shared = rows(one), rows(two)
    assert [row["loss"] for row in shared] == pytest.approx([row["loss"] for row in alone], rel=2e-6)
    assert [row["grad_norm"] for row in shared] == pytest.approx([row["grad_norm"] for row in alone], rel=1e-5)
    for key in ("tokens", "loss_tokens"):
        assert [row.get(key) for row in shared] == [row.get(key) for row in alone]
    assert first == second and first[0] == pytest.approx(whole.eval, rel=1e-5)
    checkpoint = Path(two.run.dir) / "checkpoints" / "step_1"
    after = train.run(mixed(*plain, f"run.resume={checkpoint}", dir="after"))
    assert list(after.losses().values()) == pytest.approx([row["loss"] for row in alone[1:]], rel=1e-5)


def test_fp8_proves_itself_on_each_rank_and_begins_with_the_loss_of_one_process(mixed):
    one, two = (
        mixed("data.eval=[]", "fp8.activations=fp8", "train.steps=2", f"parallel.context={n}", dir=f"fp8_{n}")
        for n in (1, 2)
    )
    train.run(one)
    ranks.run(run_on, 2, [text_of(two)], context=2)
    alone, shared = ([row["loss"] for row in rows(cfg)] for cfg in (one, two))
    assert shared == pytest.approx(alone, rel=3e-3) and shared[0] == pytest.approx(alone[0], rel=1e-6)
    proof = json.loads((Path(two.run.dir) / "proof.json").read_text())
    assert not proof["pending"] and not proof["missing"]


@pytest.mark.long
def test_four_ranks_with_copies_shards_and_every_saving(mixed):
    """Copies or shards beside a context, 2 x 2; blocks that run again, LoRA, an update in backward, BF16 gathers."""
    over = ("fp8.recipe=off", "data.eval=[]", "train.steps=2", "train.global_batch=2")
    again, backward = ("train.recompute=full",), ("optimizer.update=backward",)
    lora = ("fp8.recipe=blockwise", "fp8.activations=fp8", "lora={rank: 2}")
    bf16 = ("train.recompute=selective", "train.gather=bf16")
    close = {again: 2e-6, lora: 3e-3, bf16: 3e-2}  # to the run of one process
    alone = {way: mixed(*over, *way, dir=f"alone{n}") for n, way in enumerate(close)}
    for cfg in alone.values():
        train.run(cfg)
    for replicate, ways in ((1, (again, lora, bf16)), (2, (again, backward, bf16))):
        asked = {way: mixed(*over, *way, "parallel.context=2", f"parallel.replicate={replicate}", dir=f"{replicate}{n}")
                 for n, way in enumerate(ways)}  # fmt: skip
        ranks.run(run_on, 4, [text_of(cfg) for cfg in asked.values()], context=2, replicate=replicate)
        for way, cfg in asked.items():
            losses = [row["loss"] for row in rows(cfg)]
            if way is backward:  # which one process would do with another batch
                assert losses[0] == pytest.approx(rows(asked[again])[0]["loss"], rel=2e-6)
            else:
                assert losses == pytest.approx([row["loss"] for row in rows(alone[way])], rel=close[way])


def test_a_plan_counts_a_ranks_share(mixed, place):
    cfg = mixed(f"model.path={place / 'text'}", "fp8.recipe=off", "parallel={context: 4, ulysses: 2}")
    tokens = Tokens({"foundation": 1024, "lm_head": 1024}, 1024, 0)
    found = tokens.shared(4)
    assert (found.counts["foundation"], found.row, found.sample, found.rows) == (256, 256, 1024, 1)
    seen = Tokens({"foundation": 1024, "image_encoder": 1200, "image_projector": 300}, 1024, 600).shared(4)
    assert (seen.counts["image_encoder"], seen.counts["image_projector"], seen.row) == (600, 150, 256)
    model, family = planning.meta_model(cfg)
    assert attention_flops(model.config, tokens) == 4 * attention_flops(model.config, found)
    _, _, notes = planning.plan_model(cfg, model, family)
    assert any("4 ranks share the tokens of each pack; 2 exchange heads for tokens, 2 gather" in note for note in notes)
    assert planning.count_micro_steps(cfg, 4) == 2 == planning.count_micro_steps(cfg)


def _routed(world: World, text: str) -> list[Any]:
    return run_on(world, [text])


@pytest.mark.long
def test_routers_are_balanced_over_the_row_and_not_over_its_parts(make, tmp_path):
    moe = tiny.write("qwen3_vl_moe", tmp_path / "moe", size="mini")
    over = (f"model.path={moe}", *PACKED, "fp8.recipe=off", "train.router_aux_loss_coef=0.1", "train.logits=chunked")
    one, two = make(*over, dir="one"), make(*over, "parallel={context: 2, ulysses: 1}", dir="two")
    train.run(one)
    ranks.run(_routed, 2, text_of(two), context=2)
    for alone, shared in zip(rows(one), rows(two), strict=True):
        for key in ("loss", "aux_loss", "expert_load_max", "expert_load_min", "experts_idle"):
            assert shared[key] == pytest.approx(alone[key], rel=1e-5), key


def test_rows_are_shared_where_they_are_packed(make):
    for over, why in (
        (
            ("parallel.context=2",),
            r"parallel\.context: 2 ranks would share the tokens of packed rows, and rows are not packed",
        ),
        (("parallel.context=2", "train.phase=preference"), "ranks cannot share the rows of phase preference"),
    ):
        with pytest.raises(ConfigError, match=why):
            make(*over)
