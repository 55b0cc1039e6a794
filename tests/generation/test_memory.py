"""Predicted bytes compared with those that the engine allocates."""

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
from tests.generation.conftest import make_prompts


class Peak(TorchDispatchMode):
    """Measures the peak of bytes in storages that operations allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.load_mini = 0, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = op(*args, **(kwargs or {}))
        self.load_mini = {key: found for key, found in self.load_mini.items() if not found[0].expired()}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in inputs | set(
                self.load_mini
            ):
                self.load_mini[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(count for _, count in self.load_mini.values()))
        return out


def allocated_bytes(engine: Engine, prompts, new: int, group: int):
    """Generate `group` samples of exactly `new` tokens per prompt, and return the bytes that the engine held."""
    ends = engine.caller.model.generation_config
    before, ends.eos_token_id = ends.eos_token_id, []
    try:
        completions = engine.generate(prompts, Sampling(new), group)
    finally:
        ends.eos_token_id = before
    assert all(len(c.tokens) == new for c in completions)
    return engine.bytes


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe"])
def test_predicted_bytes_match_the_engine(load_mini, kv, group, family):
    model, processor = load_mini(family)
    prompts = make_prompts(model, processor, 8)
    longest = max(len(p.input_ids) for p in prompts)
    engine = Engine(model, processor.tokenizer, slots=8, kv=kv, page=4)
    measured = allocated_bytes(engine, prompts, 5, group)
    predicted = predict(model.config, Shape(8, longest, 5, group, page=4), kv, torch.float32)
    assert measured == {"cache": predicted.cache, "slots": predicted.slots}
    engine.release()
    assert allocated_bytes(engine, prompts, 5, group)["cache"] == predicted.cache


def test_bytes_per_token_of_qwen3_8b():
    """36 layers, 8 heads of 128: 144 KiB in BF16, 74.25 KiB in FP8."""
    config = models.tiny_config("qwen3")
    config.num_hidden_layers, config.num_key_value_heads, config.head_dim = 36, 8, 128
    for kv, kib in (("bf16", 144), ("fp8", 74.25)):
        short, long = (predict(config, Shape(1, 16, new), kv) for new in (1, 17))
        assert (long.cache - short.cache) / 16 == kib * 1024


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_sequences_that_fit_is_the_maximum(kv):
    config = models.tiny_config("qwen3_vl")
    for budget in (1 << 20, 10 << 20, 1 << 30):
        count = sequences_that_fit(budget, config, 60, Sampling(40), group=8, kv=kv)
        assert count > 0 and predict(config, Shape(count, 60, 40, 8), kv).total <= budget
        assert predict(config, Shape(count + 1, 60, 40, 8), kv).total > budget
    assert sequences_that_fit(1000, config, 60, Sampling(40)) == 0


@pytest.mark.parametrize("most", [1, 2, 7, 64, 1 << 31])
def test_most_that_fit_finds_the_largest_number(most):
    for limit in (0, 1, 2, 6, 7, 8, most // 2, most - 1, most, most + 1):
        allowed = range(1, most + 1)
        assert most_that_fit(most, partial(_up_to, limit, allowed)) == min(limit, most)


def _up_to(limit: int, allowed: range, count: int) -> bool:
    return allowed.index(count) < limit


@pytest.mark.parametrize(
    ("kv", "options"),
    [
        ("bf16", {}),
        ("bf16", {"temperature": 0.0}),
        ("fp8", {"top_p": 0.9, "min_p": 0.01}),
        ("fp8", {"top_p": 0.9, "top_k": 9, "excluded": (3,)}),
    ],
    ids=["bf16", "greedy", "fp8-top_p", "fp8-top_p-top_k"],
)
@pytest.mark.parametrize("long", [True, False], ids=["keys", "logits"])
def test_peak_of_a_decode_step_is_predicted(kv, options, long, monkeypatch):
    """The peak is dominated by keys and values or by logits; activations of the model are not part of the prediction.
    Both dtypes occur with both caches, and with each sampling option."""
    dtype = (torch.float32, torch.bfloat16)[(bool(options) + (kv == "fp8" and "top_k" in options) + long) % 2]
    sequences, prompt, new, vocabulary = (24, 801, 8, 64) if long else (200, 1, 3, 6000)
    config = models.tiny_config("qwen3", vocab=vocabulary)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    engine = Engine(model, SimpleNamespace(eos_token_id=None), slots=sequences, kv=kv)
    step, peaks = batch.Batch._step, []

    def measure_step(self, active):
        with Peak() as peak:
            step(self, active)
        peaks.append(peak.most)

    monkeypatch.setattr(batch.Batch, "_step", measure_step)
    sampling = Sampling(new, **options)
    engine.generate([Prompt(np.full(prompt, 7), number) for number in range(sequences)], sampling)
    predicted = predict(config, Shape(sequences, prompt, new), kv, dtype, sampling)
    assert abs(max(peaks) - predicted.workspace) < 0.05 * predicted.total, (max(peaks), predicted)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("prompt", [900, 2000], ids=["a chunk", "chunks"])
def test_workspace_of_cache_kernels_is_predicted(kv, prompt, monkeypatch):
    """As on a GPU, where nothing is gathered; gathered keys and values would be about as large as the cache."""
    paged = pytest.importorskip("octavo.fp8.kernels.triton_kernels.paged")
    config, sequences, new = models.tiny_config("qwen3"), 8, 20
    config.vocab_size = 2  # makes logits negligible
    shape, model = Shape(sequences, prompt, new), models.cache_shape(config)
    monkeypatch.setattr(kv_cache.kernels, "why_not_paged", lambda device: None)
    monkeypatch.setattr(paged, "launch", lambda *args, **options: None)
    cache = kv_cache.Cache(model, shape.pages, shape.page, kv, torch.bfloat16, torch.device("cpu"))
    q = torch.zeros(sequences, model.queries, model.dim, dtype=torch.bfloat16)
    table = torch.zeros(sequences, -(-(prompt + new) // shape.page), dtype=torch.int32)
    with Peak() as peak:
        cache.attend(0, q, table, table[:, 0], 1.0)
    predicted, gathered = (predict(config, shape, kv, in_place=in_place) for in_place in (True, False))
    assert peak.most == predicted.workspace and gathered.workspace > 0.9 * predicted.cache


def test_mpt_with_expansion_ratio_is_predicted(load_mini) -> None:
    """MPT has `expansion_ratio` instead of `intermediate_size`."""
    config = load_mini("mpt")[0].config
    assert not hasattr(config, "intermediate_size") and predict(config, Shape(2, 16, 4), "bf16").total > 0
