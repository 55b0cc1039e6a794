"""Mixtures of experts in training: the load-balancing loss is added once and weighed right, and loads are those of the
routers' choices."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo import fp8, models, train
from octavo.fp8 import activation_checkpointing
from octavo.fp8.observe import uncounted
from octavo.models.forward.unused_towers import dummy_image_inputs
from octavo.models.tiny import tiny
from octavo.parallel import World
from octavo.train.forward import losses, routing
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup import planning
from octavo.train.step.step import Stepper
from tests.train.test_ranks import on_ranks

FIGURES = ("loss", "aux_loss", "grad_norm", "expert_load_max", "expert_load_min", "experts_idle", "experts")


@pytest.fixture(scope="session")
def folder(place: Path) -> Path:
    return tiny.write("qwen3_vl_moe", place / "moe", size="mini")


@pytest.fixture
def moe(make, folder: Path, tmp_path: Path):
    """moe("key=value", ..., dir=...) -> two steps over samples of very different lengths, images and none."""
    rows = [
        {"conversations": [{"from": "human", "value": " ".join(["Say one."] * n)}, {"from": "gpt", "value": "1"}]}
        for n in range(1, 17)
    ]
    (tmp_path / "talk.json").write_text(json.dumps(rows))
    images = make().data.train[0].path
    over = (
        f"model.path={folder}", f"data.train=[{{path: {images}}}, {{path: {tmp_path / 'talk.json'}, weight: 3}}]",
        "data.eval=[]",
        "train.steps=2", "train.warmup=0", "train.micro_batch=1", "train.router_aux_loss_coef=0.5", "train.clip=0",
    )  # fmt: skip
    return lambda *more, dir="run": make(*over, *more, dir=dir)


def figures(cfg) -> list[dict]:
    train.run(cfg)
    return [{key: row[key] for key in FIGURES if key in row} for row in read_rows(Path(cfg.run.dir) / "metrics.jsonl")]


def by_hand(stepper: Stepper, batches) -> dict:
    """The same step by transformers alone: its losses, its router logits, one graph for all micro-batches."""
    model = copy.deepcopy(stepper.model)
    text = model.config.get_text_config()
    denominator = losses.count([b["labels"] for b in batches], "token")
    tokens = sum(int(b["attention_mask"].sum()) for b in batches)
    total = aux = torch.zeros(())
    pairs = torch.zeros(text.num_hidden_layers, text.num_experts)
    for batch in batches:
        inputs = {k: v for k, v in batch.items() if k not in ("meta", "labels")}
        out = model(**inputs, output_router_logits=True, use_cache=False)
        weight = losses.weights(batch["labels"], "token", denominator)
        total = total + (losses.cross_entropy(out.logits[:, :-1], losses.targets(batch["labels"])) * weight).sum()
        real = batch["attention_mask"].reshape(-1).bool()
        aux = aux + out.aux_loss * (int(real.sum()) / tokens)
        for layer, logits in enumerate(out.router_logits):
            chosen = logits.topk(text.num_experts_per_tok).indices[real]
            pairs[layer] += torch.bincount(chosen.flatten(), minlength=text.num_experts)
    (total + 0.5 * aux).backward()
    total, aux = total.detach(), aux.detach()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    share = pairs / pairs.sum(1, keepdim=True)
    return {
        "loss": float(total), "aux_loss": float(aux), "grad_norm": float(norm), "experts_idle": int((pairs == 0).sum()),
        "expert_load_max": float(share.max()), "expert_load_min": float(share.min()),
    }  # fmt: skip


@pytest.mark.parametrize("micro", [1, 2])
def test_a_step_is_what_transformers_gives_micro_batch_by_micro_batch(moe, monkeypatch, micro):
    """Micro-batches of many lengths, padded where there are two in one: each token weighs the same in both losses."""
    expected, lengths, run = [], set(), Stepper.run

    def watched(self, batches, *args):
        expected.append(by_hand(self, batches))
        lengths.update(b["meta"].tokens for b in batches)
        return run(self, batches, *args)

    monkeypatch.setattr(Stepper, "run", watched)
    for got, want in zip(figures(moe("fp8.recipe=off", f"train.micro_batch={micro}")), expected, strict=True):
        assert got["aux_loss"] > 2
        for key, value in want.items():
            assert got[key] == pytest.approx(value, rel=1e-4, abs=1e-7), key
    assert max(lengths) > 1.5 * min(lengths)


def test_recomputation_and_evaluation_change_no_figure(moe, place):
    plain = figures(moe(dir="plain"))
    assert plain == figures(moe("train.recompute=full", dir="again"))
    seen = figures(moe(f"data.eval=[{{path: {place / 'digits/test.json'}}}]", "run.eval_every=1", dir="seen"))
    assert plain == seen


@pytest.mark.long
def test_absent_is_the_checkpoints_own_factor_and_zero_is_off(moe, folder):
    own = models.read_config(folder).get_text_config().router_aux_loss_coef
    assert own > 0
    absent = figures(moe("train.router_aux_loss_coef=null", dir="absent"))
    assert absent == figures(moe(f"train.router_aux_loss_coef={own}", dir="own"))
    off = figures(moe("train.router_aux_loss_coef=0", dir="off"))
    assert "aux_loss" not in off[0] and off[0]["experts"] == absent[0]["experts"]
    assert off[0]["loss"] == absent[0]["loss"] and off[0]["grad_norm"] != absent[0]["grad_norm"]


def test_a_model_without_routers_has_no_such_loss(make, moe, folder, monkeypatch):
    dense = make("data.eval=[]", "train.steps=1", "train.warmup=0")
    assert figures(dense)[0].keys() == {"loss", "grad_norm"}
    with pytest.raises(train.TrainError, match="router_aux_loss_coef is 0.1, but .* is not a mixture of experts"):
        train.run(cfg := make("train.router_aux_loss_coef=0.1", dir="c"))
    assert not Path(cfg.run.dir).exists()  # so that the fix can be followed
    with pytest.raises(train.TrainError, match="and has no router. Remove the key"):
        planning.plan_for(cfg)
    model = models.empty(folder)
    assert routing.aux_loss_coef(moe(), model) == 0.5
    monkeypatch.setattr(routing, "_has_aux_loss", lambda model: False)
    with pytest.raises(train.TrainError, match="computes no load-balancing loss"):
        routing.aux_loss_coef(moe(), model)


def test_only_logged_steps_are_counted_and_tensorboard_has_them(moe):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = moe("run.log_every=3", "train.steps=5", "run.tensorboard=true")
    rows = figures(cfg)
    assert len(rows) == 3 and all("experts" in row for row in rows)
    events = EventAccumulator(str(Path(cfg.run.dir) / "tensorboard"))
    events.Reload()
    for tag in ("aux_loss", "expert_load_max", "expert_load_min", "experts_idle"):
        assert [e.value for e in events.Scalars(f"train/{tag}")] == pytest.approx([row[tag] for row in rows])


@pytest.mark.long
def test_two_ranks_balance_and_count_as_one(moe):
    one = figures(moe(dir="one"))
    cfg = moe(dir="two")
    on_ranks(cfg)
    two = read_rows(Path(cfg.run.dir) / "metrics.jsonl")
    for a, b in zip(one, two, strict=True):
        assert [b["aux_loss"], b["loss"]] == pytest.approx([a["aux_loss"], a["loss"]], rel=1e-3)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-2)
    assert two[0]["experts"] == one[0]["experts"]


def test_padding_is_left_out_where_images_have_experts_of_their_own(tmp_path):
    model = models.load(tiny.write("ernie4_5_vl_moe", tmp_path / "ernie", size="mini")).train()
    image = dummy_image_inputs(model, models.describe(model))
    ids = torch.tensor([[7, 8, model.config.image_token_id, 9, 10, 11]])
    found = []
    for padding in (0, 5):
        padded, mask = (torch.nn.functional.pad(x, (0, padding)) for x in (ids, torch.ones_like(ids)))
        kinds = (padded == model.config.image_token_id).long()
        inputs = {"input_ids": padded, "attention_mask": mask, "moe_mm_token_type_ids": kinds}
        load = routing.ExpertLoad(model)
        load.begin(torch.device("cpu"))
        load.batch({**inputs, "meta": SimpleNamespace(tokens=6)}, torch.device("cpu"))
        model(**inputs, **image, mm_token_type_ids=kinds, use_cache=False)
        found.append(load.end(World())["experts"])
    assert found[0] == found[1] and len(found[0]) == 2
    assert found[0]["model.language_model.layers.1.mlp.vision_moe.experts"]["idle"] == 6  # two of eight have the token


def test_only_training_forwards_are_counted_and_each_once(folder):
    model = models.load(folder, dtype=torch.float32)
    activation_checkpointing(models.describe(model).layers(model), "full")
    load, ids = routing.ExpertLoad(model), torch.arange(40).view(2, 20)
    load.begin(ids.device)
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.eval()(input_ids=ids, use_cache=False)
    with uncounted():
        model.train()(input_ids=ids, use_cache=False)
    assert load.layers == 2 and [float(count.sum()) for count in load._counts] == [80, 80]


def test_compiled_blocks_balance_and_count_as_eager_ones(folder):
    model = models.load(folder, dtype=torch.float32)
    fp8.apply(model, fp8.plan(model))
    model.train()
    load = routing.ExpertLoad(model)
    ids = torch.arange(40).view(2, 20)

    def step() -> tuple:
        model.zero_grad()
        load.begin(ids.device)
        out = model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
        out.loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return out.loss.item(), out.aux_loss.item(), grads, load.end(World(device=ids.device))

    eager = step()
    for layer in model.model.language_model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    for _ in range(2):
        compiled = step()
        assert compiled[:2] == eager[:2] and compiled[3] == eager[3]
        assert all(map(torch.equal, compiled[2], eager[2]))
