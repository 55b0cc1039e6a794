"""The models package with the FP8 core: swapped classes are not saved, and dummy images are not counted."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from octavo import fp8, models
from octavo.checkpoint import save_hf
from octavo.fp8.metrics import sqnr
from octavo.fp8.observe import uncounted
from octavo.models.forward.unused_towers import attach_dummy_image
from octavo.models.structure.skeleton import auto_class
from octavo.parallel import World
from tests.models.conftest import MANY, auto_config, batch, conversation, some_image


def converted(folder):
    model = models.load(folder)
    family = models.describe(model)
    plan = fp8.plan(model, "blockwise", components=family.components)
    return fp8.apply(model, plan), family, plan


@pytest.mark.parametrize("family", [*MANY, "llavaonevision1_5", "nvila", "mistral3"])  # others: train/test_seeing.py
def test_a_converted_model_saves_as_a_stock_one(checkpoint, tmp_path, family):
    source = checkpoint(family)
    model, described, plan = converted(source)
    assert any(row.fp8 for row in plan.rows)
    out = save_hf(model, source, tmp_path / "hf", World())
    written, read = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert written.keys() == read.keys() and all(torch.equal(value, read[name]) for name, value in written.items())
    auto = auto_class(model.config)
    inputs = batch(models.load_processor(out), image=described.has_vision)
    with torch.no_grad():
        stock = auto.from_pretrained(out, config=auto_config(out))
        exact, rounded = stock(**inputs).logits, model(**inputs).logits
    assert not torch.equal(exact, rounded)
    assert sqnr(exact, rounded) > 15


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "internvl"])
def test_a_dummy_image_is_not_counted(checkpoint, family):
    model, described, plan = converted(checkpoint(family))
    towers = {row.name for row in plan.rows if row.component in ("image_encoder", "image_projector")}
    inputs = batch(models.load_processor(checkpoint(family)), image=False)

    def counted(attach: bool) -> tuple[set[str], torch.Tensor]:
        handle = attach_dummy_image(model, described, lambda: attach, uncounted)
        with fp8.count_gemms() as counts:
            loss = model(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
        handle.remove()
        return {layer for layer, _, _ in counts}, loss.detach()

    without, plain = counted(False)
    with_dummy, loss = counted(True)
    assert torch.equal(plain, loss)
    assert without == with_dummy and not with_dummy & towers
    for name, parameter in model.named_parameters():
        if described.component_of(name.rpartition(".")[0]) in ("image_encoder", "image_projector"):
            assert parameter.grad is not None and torch.count_nonzero(parameter.grad) == 0, name


def test_a_converted_model_answers(checkpoint):
    model, _, _ = converted(checkpoint("qwen3_vl"))
    processor = models.load_processor(checkpoint("qwen3_vl"))
    answer = models.generate(model, processor, conversation(True)[:1], [some_image()], max_new_tokens=3)
    assert isinstance(answer, str)
