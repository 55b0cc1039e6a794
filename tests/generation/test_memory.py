"""Bytes predicted from a configuration, beside those that the engine holds and makes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from octavo import models
from octavo.generation import (
    Engine,
    Prompt,
    Sampling,
    Shape,
    batch,
    kv_cache,
    most_that_fit,
    predict,
    sequences_that_fit,
)
from tests.generation.conftest import prompts_of


class Peak(TorchDispatchMode):
    """The most bytes alive at once of storages that operations made since."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.made = 0, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = op(*args, **(kwargs or {}))
        self.made = {key: found for key, found in self.made.items() if not found[0].expired()}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in given | set(self.made):
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(count for _, count in self.made.values()))
        return out


def held(engine: Engine, prompts, new: int, group: int):
    """What the engine holds of prompts with `group` samples of exactly `new` tokens, and the completions."""
    ends = engine.caller.model.generation_config
    before, ends.eos_token_id = ends.eos_token_id, []
    try:
        got = engine.generate(prompts, Sampling(new), group)
    finally:
        ends.eos_token_id = before
    assert all(len(c.tokens) == new for c in got)
    return engine.bytes


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe"])
def test_bytes_are_those_that_the_engine_holds(made, kv, group, family):
    model, processor = made(family)
    prompts = prompts_of(model, processor, 8)
    longest = max(len(p.input_ids) for p in prompts)
    engine = Engine(model, processor.tokenizer, slots=8, kv=kv, page=4)
    found = held(engine, prompts, 5, group)
    wanted = predict(model.config, Shape(8, longest, 5, group, page=4), kv, torch.float32)
    assert found == {"cache": wanted.cache, "slots": wanted.slots}
    engine.release()
    assert held(engine, prompts, 5, group)["cache"] == wanted.cache


def test_a_published_models_token():
    """36 layers, 8 heads of 128: 144 KiB in BF16, 74.25 KiB in FP8."""
    config = models.tiny_config("qwen3")
    config.num_hidden_layers, config.num_key_value_heads, config.head_dim = 36, 8, 128
    for kv, kib in (("bf16", 144), ("fp8", 74.25)):
        one, two = (predict(config, Shape(1, 16, new), kv) for new in (1, 17))
        assert (two.cache - one.cache) / 16 == kib * 1024


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_what_fits_is_the_most_that_fits(kv):
    config = models.tiny_config("qwen3_vl")
    for budget in (1 << 20, 10 << 20, 1 << 30):
        count = sequences_that_fit(budget, config, 60, Sampling(40), group=8, kv=kv)
        assert count > 0 and predict(config, Shape(count, 60, 40, 8), kv).total <= budget
        assert predict(config, Shape(count + 1, 60, 40, 8), kv).total > budget
    assert sequences_that_fit(1000, config, 60, Sampling(40)) == 0


@pytest.mark.parametrize("most", [1, 2, 7, 64, 1 << 31])
def test_the_largest_that_fits_is_found_among_so_many(most):
    for limit in (0, 1, 2, 6, 7, 8, most // 2, most - 1, most, most + 1):
        asked = range(1, most + 1)  # no other number is looked at
        assert most_that_fit(most, partial(_up_to, limit, asked)) == min(limit, most)


def _up_to(limit: int, asked: range, count: int) -> bool:
    return asked.index(count) < limit


@pytest.mark.parametrize(
    ("kv", "how"),
    [
        ("bf16", {}),
        ("bf16", {"temperature": 0.0}),
        ("fp8", {"top_p": 0.9, "min_p": 0.01}),
        ("fp8", {"top_p": 0.9, "top_k": 9, "never": (3,)}),
    ],
    ids=["bf16", "greedy", "fp8-top_p", "fp8-top_p-top_k"],
)
@pytest.mark.parametrize("long", [True, False], ids=["keys", "logits"])
def test_the_peak_of_a_decode_step_is_predicted(kv, how, long, monkeypatch):
    """Where either keys and values or logits decide; the model's own activations are no part of the prediction. Both
    dtypes by turns: each with both caches, and with each way of drawing where keys or where logits decide."""
    dtype = (torch.float32, torch.bfloat16)[(bool(how) + (kv == "fp8" and "top_k" in how) + long) % 2]
    sequences, prompt, new, vocabulary = (24, 801, 8, 64) if long else (200, 1, 3, 6000)
    config = models.tiny_config("qwen3", vocab=vocabulary)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    engine = Engine(model, SimpleNamespace(eos_token_id=None), slots=sequences, kv=kv)
    step, peaks = batch.Batch._step, []

    def measured(self, active):
        with Peak() as peak:
            step(self, active)
        peaks.append(peak.most)

    monkeypatch.setattr(batch.Batch, "_step", measured)
    sampling = Sampling(new, **how)
    engine.generate([Prompt(np.full(prompt, 7), number) for number in range(sequences)], sampling)
    wanted = predict(config, Shape(sequences, prompt, new), kv, dtype, sampling)
    assert abs(max(peaks) - wanted.workspace) < 0.05 * wanted.total, (max(peaks), wanted)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("prompt", [900, 2000], ids=["a chunk", "chunks"])
def test_what_kernels_of_the_cache_make_is_predicted(kv, prompt, monkeypatch):
    """As on a GPU, where nothing is gathered: what torch gathers is as large as this cache, or larger."""
    paged = pytest.importorskip("octavo.fp8.kernels.triton_kernels.paged")
    config, sequences, new = models.tiny_config("qwen3"), 8, 20
    config.vocab_size = 2  # logits are nothing beside it
    shape, model = Shape(sequences, prompt, new), models.cache_shape(config)
    monkeypatch.setattr(kv_cache.kernels, "why_not_paged", lambda device: None)
    monkeypatch.setattr(paged, "launch", lambda *args, **options: None)
    cache = kv_cache.Cache(model, shape.pages, shape.page, kv, torch.bfloat16, torch.device("cpu"))
    q = torch.zeros(sequences, model.queries, model.dim, dtype=torch.bfloat16)
    table = torch.zeros(sequences, -(-(prompt + new) // shape.page), dtype=torch.int32)
    with Peak() as peak:
        cache.attend(0, q, table, table[:, 0], 1.0)
    found, gathered = (predict(config, shape, kv, in_place=here) for here in (True, False))
    assert peak.most == found.workspace and gathered.workspace > 0.9 * found.cache


def test_a_text_model_that_names_its_width_otherwise_is_predicted(made) -> None:
    """MPT's MLP has `expansion_ratio` in the place of `intermediate_size`."""
    config = made("mpt")[0].config
    assert not hasattr(config, "intermediate_size") and predict(config, Shape(2, 16, 4), "bf16").total > 0
