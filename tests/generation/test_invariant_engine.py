"""Inside fp8.batch_invariant the engine's log-probabilities are bit for bit those of a whole padded training batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo import data, fp8, models
from octavo.data.encoding.sample import Sample
from octavo.generation import Engine, GenerationError, Sampling
from tests.generation.conftest import prompts_of


def trained(model, prompts, completions, temperature: float):
    """(log-probabilities, entropies) of each completion by one forward of all of them, padded, with gradients."""
    rows = []
    for c in completions:
        p = prompts[c.prompt]
        ids = np.concatenate([p.input_ids, c.tokens])
        kinds = None if p.mm_token_type_ids is None else np.pad(p.mm_token_type_ids, (0, len(c.tokens)))
        rows.append(Sample(ids, ids, kinds, p.pixel_values, p.image_grid_thw, p.images))
    batch = data.collate(rows, 0)
    batch = {name: x for name, x in batch.items() if name not in ("labels", "meta")}
    with fp8.batch_invariant(model):
        logits = model(**batch, use_cache=False).logits[:, :-1]
        found = fp8.log_probs(logits, batch["input_ids"][:, 1:], temperature=temperature, entropy=True)
    for row, c in enumerate(completions):
        start = len(prompts[c.prompt].input_ids) - 1
        yield tuple(x[row, start : start + len(c.tokens)].detach().numpy() for x in found)


@pytest.mark.parametrize("recipe", [None, "rowwise"], ids=["high", "fp8"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe"])
def test_the_gap_to_a_training_forward_is_zero(made, family, recipe):
    source, processor = made(family)
    model = models.load(source.name_or_path)
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, recipe))
    prompts = prompts_of(model, processor, 4)
    engine = Engine(model, processor.tokenizer, slots=5, page=4, invariant=True)
    got = engine.generate(prompts, Sampling(6, temperature=0.7, top_p=0.9), group=2)
    for completion, (logps, entropies) in zip(got, trained(model, prompts, got, 0.7), strict=True):
        assert np.array_equal(completion.logps, logps) and np.array_equal(completion.entropy, entropies)
    other = Engine(model, processor.tokenizer, slots=2, page=16, invariant=True)
    again = other.generate(prompts, Sampling(6, temperature=0.7, top_p=0.9), group=2)
    assert all(np.array_equal(a.logps, b.logps) for a, b in zip(got, again, strict=True))


def test_what_cannot_be_invariant_is_refused(made):
    model, processor = made("qwen3")
    with pytest.raises(GenerationError, match="kv is 'fp8', but an invariant engine"):
        Engine(model, processor.tokenizer, slots=1, kv="fp8", invariant=True)
    model = models.load(model.name_or_path)
    fp8.apply(model, fp8.plan(model, "tensorwise"))
    engine = Engine(model, processor.tokenizer, slots=1, invariant=True)
    with pytest.raises(fp8.InvarianceError, match="share a scale between rows"):
        engine.generate(prompts_of(model, processor, 1), Sampling(2))
    assert torch.is_grad_enabled()
