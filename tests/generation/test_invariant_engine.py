"""Inside fp8.batch_invariant, the engine's log-probabilities equal those of a padded training batch bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo import data, fp8, models
from octavo.data.encoding.sample import Sample
from octavo.generation import Engine, GenerationError, Sampling
from tests.generation.conftest import make_prompts


def training_logprobs(model, prompts, completions, temperature: float):
    """Yield (log-probabilities, entropies) of each completion, by one padded forward of all of them, with gradients."""
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
        values = fp8.log_probs(logits, batch["input_ids"][:, 1:], temperature=temperature, entropy=True)
    for row, c in enumerate(completions):
        start = len(prompts[c.prompt].input_ids) - 1
        yield tuple(x[row, start : start + len(c.tokens)].detach().numpy() for x in values)


@pytest.mark.parametrize("recipe", [None, "rowwise"], ids=["high", "fp8"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe"])
def test_engine_matches_a_training_forward_bit_for_bit(load_mini, family, recipe):
    source, processor = load_mini(family)
    model = models.load(source.name_or_path)
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, recipe))
    prompts = make_prompts(model, processor, 4)
    engine = Engine(model, processor.tokenizer, slots=5, page=4, invariant=True)
    completions = engine.generate(prompts, Sampling(6, temperature=0.7, top_p=0.9), group=2)
    for completion, (logps, entropies) in zip(
        completions, training_logprobs(model, prompts, completions, 0.7), strict=True
    ):
        assert np.array_equal(completion.logps, logps) and np.array_equal(completion.entropy, entropies)
    other = Engine(model, processor.tokenizer, slots=2, page=16, invariant=True)
    repeated = other.generate(prompts, Sampling(6, temperature=0.7, top_p=0.9), group=2)
    assert all(np.array_equal(a.logps, b.logps) for a, b in zip(completions, repeated, strict=True))


def test_unsupported_invariant_engines_are_rejected(load_mini):
    model, processor = load_mini("qwen3")
    with pytest.raises(GenerationError, match="kv is 'fp8', but an invariant engine"):
        Engine(model, processor.tokenizer, slots=1, kv="fp8", invariant=True)
    model = models.load(model.name_or_path)
    fp8.apply(model, fp8.plan(model, "tensorwise"))
    engine = Engine(model, processor.tokenizer, slots=1, invariant=True)
    with pytest.raises(fp8.InvarianceError, match="share a scale between rows"):
        engine.generate(make_prompts(model, processor, 1), Sampling(2))
    assert torch.is_grad_enabled()
