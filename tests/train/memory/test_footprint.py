"""What is predicted, without a run: `test_predicted.py` holds it against what runs count."""

from __future__ import annotations

import gc

import pytest

from octavo import models
from octavo.models.structure import shapes
from octavo.train.errors import TrainError
from octavo.train.estimate.memory import states
from octavo.train.estimate.memory.card import Card
from octavo.train.estimate.memory.footprint import MemoryEstimator, with_settings
from octavo.train.estimate.memory.micro_batch import _whole_images
from octavo.train.estimate.memory.switches import savings
from octavo.train.setup import planning
from octavo.train.setup.token_counts import Tokens, assume_tokens


def sizes(cfg, tokens: Tokens) -> MemoryEstimator:
    plan, family, _ = planning.plan_for(cfg)
    model, _ = planning.meta_model(cfg)
    return MemoryEstimator(cfg, model, family, plan, tokens, device="cpu")


def test_text_only_and_rows(make, place) -> None:
    cfg = make(f"model.path={place / 'text'}", "optimizer.master=bf16+sr", "optimizer.states=fp8")
    one = sizes(cfg, Tokens({"foundation": 64, "lm_head": 64}, 64, 0))
    two = one.estimate(with_settings(cfg, {"train.micro_batch": 2 * cfg.train.micro_batch}))
    assert two.kinds["activations"] == 2 * one.estimate(cfg).kinds["activations"] > 0
    assert two.kinds["weights"] == one.estimate(cfg).kinds["weights"]


def test_an_image_is_never_rounded_up_beyond_its_row(make) -> None:
    """Nearly square images have a few tokens more or less than asked for; the longest that a row has room for fit."""
    vision = models.vision_of(models.read_config(make().model.path))
    for row in range(3, 300):
        patches = 4 * (row - 2)
        found = _whole_images(vision, patches, patches, 1, row)
        assert (
            0.9 * (row - 2) <= found.length + 1 <= row
            and int(found.inputs["image_grid_thw"].prod()) == found.length * 4
        )


def test_objects_that_the_caller_froze_stay_frozen(make, place) -> None:
    """Tests do (tests/conftest.py): collections went through half a million of objects again in all that came after."""
    cfg = make(f"model.path={place / 'text'}")
    assert gc.get_freeze_count() > 100_000
    sizes(cfg, Tokens({"foundation": 64, "lm_head": 64}, 64, 0)).estimate(cfg)
    assert gc.get_freeze_count() > 100_000


@pytest.mark.parametrize("family", ["mistral3", "llava_onevision"])
def test_a_deep_tower_of_which_a_layer_is_asked_for(make, tmp_path, family: str) -> None:
    """Layers that do not run count where the projector asks for the output of one by its number."""
    cfg = make("fp8.recipe=off")
    kept = []
    for depth in (5, 10):
        config = models.tiny_config(family, "mini")
        config.vision_config.num_hidden_layers = depth
        model = models.empty(config)
        described = models.describe(model)
        plan, _, _ = planning.plan_model(cfg, model, described)
        tokens = Tokens({"foundation": 64, "lm_head": 64, "image_encoder": 32, "image_projector": 32}, 64, 16)
        all_of = MemoryEstimator(cfg, model, described, plan, tokens, device="cpu")
        kept.append(all_of.estimate_forward(cfg, 1).blocks["image_encoder"])
    assert kept[1] == 2 * kept[0] > 0
    masks = 4 * 32**2 if family == "mistral3" else 0  # over all patches, in fp32
    assert all_of.estimate(cfg).parts.get("mask", 0) == masks


def test_the_largest_shard_is_counted() -> None:
    held = states.ParameterInfo("w", (7, 5), True, "", "foundation")
    assert [held.elements(n) for n in (1, 2, 3, 8)] == [35, 20, 15, 5]


@pytest.mark.long
def test_a_qwen3_8b_layer_keeps_what_the_target_says() -> None:
    """A decoder layer of 4096, 12288, 32/8 heads of 128 with QK-norm: 66.4 KiB a token, one block standing for 36,
    beside what transformers ships in BF16."""
    model, family = shapes.shape_model("qwen3_vl_8b")
    tokens = Tokens({"foundation": 1024, "image_encoder": 0}, 1024, 0)

    def kib(*overrides: str) -> float:
        cfg = _shape("optimizer.master=bf16+sr", "train.seq_length=1024", *overrides)
        plan, _, _ = planning.plan_model(cfg, model, family)
        return (
            MemoryEstimator(cfg, model, family, plan, tokens).estimate_forward(cfg, 1).blocks["foundation"]
            / 36
            / 1024
            / 1024
        )

    assert 60 < kib("fp8.activations=fp8") <= 72
    assert kib("fp8.activations=fp8", "train.recompute=selective") == pytest.approx(45.7, abs=0.05)
    assert kib("fp8.activations=fp8", "train.recompute=full") == pytest.approx(8.0, abs=0.05)
    assert 200 < kib("fp8.recipe=off") < 220


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        (("optimizer.master=bf16+16",), 8.1),
        (("optimizer.master=bf16+sr",), 6.1),
        (("optimizer.master=bf16+sr", "optimizer.update=backward"), 4.1),
    ],
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_bytes_a_parameter(overrides, most: float, ranks: int) -> None:
    """Weights, master, gradients and moments of a real shape; FP8 codes of weights apart, none if recast, and twice
    for both layouts."""
    model, family = shapes.shape_model("qwen3_vl_8b")
    cfg = _shape("optimizer.states=fp8", "train.micro_batch=1", f"train.global_batch={ranks}", *overrides)
    plan, _, _ = planning.plan_model(cfg, model, family)
    all_of = MemoryEstimator(cfg, model, family, plan, Tokens({"foundation": 1024}, 1024, 0))
    recast = with_settings(cfg, {"fp8.weight_codes": "recast"})
    elements = sum(p.numel() for p in model.parameters()) / ranks
    assert most - 0.1 < all_of.persistent_bytes(recast, ranks) / elements <= most
    codes = all_of.persistent_bytes(cfg, ranks) - all_of.persistent_bytes(recast, ranks)
    assert codes == 0 if ranks > 1 else 0.8 < codes / elements < 1.1
    both = all_of.persistent_bytes(with_settings(cfg, {"fp8.weight_codes": "both"}), ranks) - all_of.persistent_bytes(
        recast, ranks
    )
    assert both == 0 if ranks > 1 else 1.99 * codes < both <= 2 * codes


def test_fp8_weights(make) -> None:
    """In one process nothing changes; of two ranks each keeps the codes of its shards and gathers codes alone."""
    cfg = make("optimizer.states=fp8")
    plain = sizes(cfg, Tokens({"foundation": 64, "lm_head": 64, "image_encoder": 16, "image_projector": 4}, 64, 16))
    param = with_settings(cfg, {"fp8.param": True})
    assert plain.estimate(param).kinds == plain.estimate(cfg).kinds
    before, after = plain.estimate(cfg, 2), plain.estimate(param, 2)
    assert before.kinds["codes"] == 0 < after.kinds["codes"] <= 0.6 * plain.estimate(cfg).kinds["codes"]
    assert after.parts["gathered"] < before.parts["gathered"]
    assert plain.estimate(with_settings(param, {"fp8.weight_codes": "recast"}), 2).kinds["codes"] == 0


def test_gathers_in_bf16(make) -> None:
    """Half the bytes on the wire and while they are whole, FP8 weights aside; a forward keeps what a BF16 model's does;
    what stands between steps stays, and in one process everything."""
    cfg = make()
    plain = sizes(cfg, Tokens({"foundation": 64, "lm_head": 64, "image_encoder": 16, "image_projector": 4}, 64, 16))
    low = with_settings(cfg, {"train.gather": "bf16"})
    assert plain.estimate(low) == plain.estimate(cfg)
    before, after = plain.estimate(cfg, 3), plain.estimate(low, 3)
    assert after.parts["gathered"] < before.parts["gathered"]
    moved = {kind for kind in after.kinds if after.kinds[kind] != before.kinds[kind]}
    assert moved == {"activations", "logits", "workspace"}
    bf16 = plain.estimate(with_settings(cfg, {"optimizer.master": "bf16+sr"}), 3)
    assert after.kinds["activations"] == bf16.kinds["activations"]


def test_copies_hold_what_their_shards_do_and_sum_gradients_besides(make) -> None:
    cfg = make()
    plain = sizes(cfg, Tokens({"foundation": 64, "lm_head": 64, "image_encoder": 16, "image_projector": 4}, 64, 16))
    copies = with_settings(cfg, {"parallel.replicate": 2})
    assert plain.estimate(copies, 4).kinds == plain.estimate(cfg, 2).kinds != plain.estimate(cfg, 4).kinds
    whole = plain.estimate(copies, 2).kinds  # also with whole weights FSDP2 frees codes with the gathered weights
    assert (
        whole["weights"] == plain.estimate(cfg).kinds["weights"]
        and whole["codes"] == 0 < plain.estimate(cfg).kinds["codes"]
    )


def test_ranks_that_share_a_row_hold_their_part_of_it(make) -> None:
    """Activations by their number; a layer's keys and values whole, but for heads that others have."""
    cfg = make()
    plain = sizes(cfg, Tokens({"foundation": 256, "lm_head": 256, "image_encoder": 64, "image_projector": 16}, 256, 16))
    alone, shared = (
        plain.estimate(cfg, 4),
        plain.estimate(with_settings(cfg, {"parallel.context": 4, "parallel.ulysses": 1}), 4),
    )
    assert shared.kinds["activations"] == pytest.approx(alone.kinds["activations"] / 4, rel=0.1)
    assert shared.kinds["logits"] == pytest.approx(alone.kinds["logits"] / 4, abs=4)
    assert shared.kinds["weights"] == alone.kinds["weights"]
    text = plain.config.get_text_config()
    whole = 2 * 256 * text.num_key_value_heads * text.head_dim
    assert shared.parts["keys"] == whole * (4 * text.num_hidden_layers + 4)
    heads = plain.estimate(with_settings(cfg, {"parallel.context": 4, "parallel.ulysses": 2}), 4)
    assert heads.parts["keys"] == shared.parts["keys"] // 2


def test_ranks_that_share_experts_gather_fewer() -> None:
    model, family = shapes.shape_model("qwen3_vl_30b_a3b")
    cfg = _shape("optimizer.master=bf16+sr", "fp8.recipe=off")
    plan, _, _ = planning.plan_model(cfg, model, family)
    held = states.list_parameters(model, family)
    whole, part = (states.gathered_bytes(cfg, *states.shard_experts(held, plan, n)) for n in (1, 8))
    experts = 128 * 3 * 768 * 2048 * 2  # of a block in BF16
    assert {b: whole[b] - part[b] for b in whole if whole[b] != part[b]} == {
        f"model.language_model.layers.{n}": experts * 7 // 8 for n in range(48)
    }


@pytest.mark.parametrize("override", ["train.recompute=selective", "train.offload_activations=true"])
def test_what_a_model_cannot_recompute_or_the_cpu_offload_is_told_or_sized(make, override: str) -> None:
    """Nothing but TrainError, which `octavo plan` turns into a sentence."""
    cfg = make("fp8.recipe=off", override)
    all_of = sizes(cfg, Tokens({"foundation": 64, "lm_head": 64, "image_encoder": 16, "image_projector": 4}, 64, 16))
    try:
        assert all_of.estimate(cfg).kinds["activations"] > 0
    except TrainError as error:
        assert "recompute" in str(error)


def _shape(*overrides: str):
    from octavo.config import load_config

    return load_config(None, ["model.path=x", "data.train=[{path: none}]", "train.steps=1", *overrides])


def test_switches_save_what_turning_them_over_changes(make, place) -> None:
    cfg = make(f"model.path={place / 'text'}", "optimizer.states=fp8")
    all_of = sizes(cfg, Tokens({"foundation": 64, "lm_head": 64}, 64, 0))
    found = {(s.key, s.value): s for s in savings(all_of)}
    states = found["optimizer.states", "fp8"]
    elements = all_of.elements
    assert states.on and states.bytes == pytest.approx((8 - 2.0625) * elements, rel=0.01)
    assert not found["train.recompute", "full"].on and found["train.recompute", "full"].bytes > 0
    assert found["optimizer.update", "backward"].bytes > 0


def test_tokens_without_data_are_said(make) -> None:
    cfg = make("data.max_pixels=64")
    model, family = planning.meta_model(cfg)
    tokens, said = assume_tokens(cfg, family.components, model.config)
    assert tokens.counts["foundation"] == 2 * 128 and tokens.counts["image_encoder"] == 2 * 4 and tokens.image == 4
    assert "micro_batch 2 x train.seq_length 128" in said and "4 patches" in said


@pytest.mark.parametrize("length", [64, 1000])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", ["llava_onevision", "nvila_lite"])
def test_tokens_that_are_assumed_can_be_counted(make, family: str, length: int, packing: bool) -> None:
    """Images cut into tiles have line breaks besides, and no more tiles than their grids."""
    more = ("data.packing=true", "train.micro_batch=1") if packing else ()
    cfg = make("fp8.recipe=off", f"train.seq_length={length}", *more)
    config = models.tiny_config(family, "mini")
    model = models.empty(config)
    described = models.describe(model)
    tokens, _ = assume_tokens(cfg, described.components, config)
    assert packing or tokens.counts["image_encoder"] <= cfg.train.micro_batch * 5 * 16
    plan, _, _ = planning.plan_model(cfg, model, described)
    assert MemoryEstimator(cfg, model, described, plan, tokens, device="cpu").estimate(cfg).kinds["activations"] > 0


@pytest.mark.parametrize("text", ["80", "80GB", "80 gb", "H100"])
def test_cards(text: str) -> None:
    card = Card.parse(text)
    assert card.size == 80e9 and card.usable == 80e9 - 1e9 - 1.6e9


@pytest.mark.parametrize("text", ["", "big", "-3GB", "80TB", "nan"])
def test_card_rejects_invalid_text(text: str) -> None:
    with pytest.raises(TrainError, match="cannot parse the card .*: give its memory, e.g. 80GB"):
        Card.parse(text)


def test_a_frozen_base_holds_dgrads_layout_beside_its_codes_where_both_are_asked_for(make, place) -> None:
    """Of the 14 layers those that a gradient passes through: all but the first one's q, k and v."""
    cfg = make("lora={rank: 4}", "model.load_in_fp8=block")
    all_of = sizes(cfg, Tokens({"foundation": 64, "lm_head": 64}, 64, 0))
    kept, both = (
        all_of.estimate(with_settings(cfg, {"fp8.weight_codes": way})).kinds["codes"] for way in ("keep", "both")
    )
    assert 0.5 * 98_360 < both - kept <= 98_360
