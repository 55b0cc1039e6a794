"""Predicted bytes against those of a real step: what stands to the byte, what is kept within 5 %."""

from __future__ import annotations

import pytest
import torch

from octavo import data, fp8, models, parallel
from octavo.models import shapes
from octavo.train import build, losses, planning, static
from octavo.train.errors import TrainError
from octavo.train.footprint import Card, Footprints, changed
from octavo.train.forward import Forward, autocasts, model_dtype
from octavo.train.memory import Memory
from octavo.train.optim import adamw
from octavo.train.switches import assumed, switches
from octavo.train.tokens import Tokens, _patches

CPU = torch.device("cpu")


def sizes(cfg, tokens: Tokens) -> Footprints:
    plan, family, _ = planning.plan_for(cfg)
    model, _ = planning.model_of(cfg)
    return Footprints(cfg, model, family, plan, tokens, device="cpu")


def step(cfg) -> tuple[dict[str, int], Tokens]:
    """The kinds of one real step on the first micro-batch, and its tokens."""
    processor = models.load_processor(cfg.model.path, cfg.data.max_pixels, cfg.data.min_pixels)
    loader = data.train_loader(cfg, processor)
    batch = next(iter(loader))[0]
    loader.close()
    plan, family, _ = planning.plan_for(cfg)
    model = models.load(cfg.model.path, dtype=model_dtype(cfg))
    models.freeze(model, family, cfg.model.freeze)
    fp8.apply(model, plan)
    build.keep_less(model, family, cfg, print)
    model.train()
    head = build.losses_of(model, cfg, print)
    optimizer = adamw(model, cfg)
    forward, memory = Forward(model, parallel.World(0, 1, 0, CPU, None), autocasts(cfg, CPU)), Memory(model, family)
    keep = torch.arange(batch["input_ids"].shape[1] - 1)
    with memory.forward():
        target = batch["input_ids"][:, keep]  # every token counts, as is assumed
        if head is None:
            loss = losses.cross_entropy(forward(batch, keep), target).sum()
        else:
            with head.losses(target) as given:
                loss = given.take(forward(batch, keep)).sum()
    loss.backward()
    before = memory.report(optimizer)["gradients"]
    optimizer.step()
    found = {**memory.report(optimizer), "gradients": before}
    rows = len(batch["input_ids"])
    length = batch["input_ids"].shape[1]
    counts = {"foundation": rows * length, "lm_head": rows * length}
    image = 0
    if "pixel_values" in batch:
        patches, out, images = _patches(batch, model.config)
        counts |= {"image_encoder": patches, "image_projector": out}
        image = patches // images
    return found, Tokens(counts, length, image)


LONG = [
    (),
    ("optimizer.master=bf16+16", "optimizer.states=bf16", "train.recompute=full"),
    ("optimizer.states=coat", "train.recompute=selective", "fp8.activations=fp8"),
    ("fp8.recipe=rowwise", "train.precision=bf16", "model.freeze=[image_encoder]"),
    ("fp8.recipe=off", "train.recompute={foundation: full}"),
]
CASES = [
    ("train.logits=full", "fp8.weight_codes=recast"),
    ("optimizer.master=bf16+sr", "optimizer.states=fp8", "fp8.activations=fp8"),
    *(pytest.param(case, marks=pytest.mark.long) for case in LONG),
]


@pytest.mark.parametrize("overrides", CASES, ids=lambda o: " ".join(o) or "default")
def test_a_step_needs_what_was_predicted(make, overrides) -> None:
    cfg = make("train.micro_batch=1", "train.global_batch=1", *overrides)
    found, tokens = step(cfg)
    want = sizes(cfg, tokens).of(cfg).kinds
    for kind in ("weights", "master", "gradients", "optimizer", "codes"):
        assert found[kind] == want[kind], kind
    for kind in ("activations", "logits"):
        assert found[kind] == pytest.approx(want[kind], rel=0.05), kind


def test_text_only_and_rows(make, place) -> None:
    cfg = make(f"model.path={place / 'text'}", "optimizer.master=bf16+sr", "optimizer.states=fp8")
    one = sizes(cfg, Tokens({"foundation": 64, "lm_head": 64}, 64, 0))
    two = one.of(changed(cfg, {"train.micro_batch": 2 * cfg.train.micro_batch}))
    assert two.kinds["activations"] == 2 * one.of(cfg).kinds["activations"] > 0
    assert two.kinds["weights"] == one.of(cfg).kinds["weights"]


def test_the_largest_shard_is_counted() -> None:
    held = static.Held("w", (7, 5), True, "", "foundation")
    assert [held.elements(n) for n in (1, 2, 3, 8)] == [35, 20, 15, 5]


def test_a_qwen3_8b_layer_keeps_what_the_target_says() -> None:
    """66.7 KiB a token, whatever the depth: one block stands for 36. FP8 states and bf16+sr: 6.1 bytes a parameter."""
    cfg = _shape("optimizer.master=bf16+sr", "optimizer.states=fp8", "fp8.activations=fp8", "train.seq_length=1024")
    model, family = shapes.shape_model("qwen3_vl_8b")
    plan, family, _ = planning.plan_model(cfg, model, family)
    found = Footprints(cfg, model, family, plan, Tokens({"foundation": 1024, "image_encoder": 0}, 1024, 0)).of(cfg)
    assert 60 < found.per_token["foundation"] / 36 / 1024 < 72
    elements = sum(p.numel() for p in model.parameters())
    standing = sum(found.kinds[k] for k in ("weights", "master", "gradients", "optimizer"))
    assert standing / elements < 6.1


def _shape(*overrides: str):
    from octavo.config import load_config

    return load_config(None, ["model.path=x", "data.train=[{path: none}]", "train.steps=1", *overrides])


def test_switches_save_what_turning_them_over_changes(make, place) -> None:
    cfg = make(f"model.path={place / 'text'}", "optimizer.states=fp8")
    all_of = sizes(cfg, Tokens({"foundation": 64, "lm_head": 64}, 64, 0))
    found = {(s.key, s.value): s for s in switches(all_of)}
    states = found["optimizer.states", "fp8"]
    elements = all_of.elements
    assert states.on and states.bytes == pytest.approx((8 - 2.0625) * elements, rel=0.01)
    assert not found["train.recompute", "full"].on and found["train.recompute", "full"].bytes > 0
    assert found["optimizer.update", "backward"].bytes > 0


def test_tokens_without_data_are_said(make) -> None:
    cfg = make("data.max_pixels=64")
    model, family = planning.model_of(cfg)
    tokens, said = assumed(cfg, family.components, model.config)
    assert tokens.counts["foundation"] == 2 * 128 and tokens.counts["image_encoder"] == 2 * 4 and tokens.image == 4
    assert "micro_batch 2 x train.seq_length 128" in said and "4 patches" in said


@pytest.mark.parametrize("text", ["80", "80GB", "80 gb"])
def test_cards(text: str) -> None:
    card = Card.parse(text)
    assert card.size == 80e9 and card.usable == 80e9 - 1e9 - 1.6e9


@pytest.mark.parametrize("text", ["", "big", "-3GB", "80TB", "nan"])
def test_a_card_that_is_none(text: str) -> None:
    with pytest.raises(TrainError, match="as in 80GB"):
        Card.parse(text)
