"""Decoding as on a GPU, on a CPU: kernels of the cache in Triton's interpreter, a step recorded and replayed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from octavo import adapters, fp8, models
from octavo.config import LoraSection
from octavo.fp8.arithmetic import formats
from octavo.fp8.kernels.triton_kernels.launch import launches
from octavo.fp8.weights import is_frozen
from octavo.generation import Context, Engine, Sampling, batch, kv_cache, sampling
from octavo.generation.decode_cuda_graph import Replayed, why_eager
from tests.generation.conftest import prompts_of
from tests.generation.tape import Tape, recording

SAMPLED = Sampling(4, temperature=1.0, top_p=0.9, top_k=60, min_p=0.01, seed=3, never=(5, 9))
GREEDY = Sampling(4, temperature=0)


def codes_of(model):
    """What FP8 layers keep of their weights."""
    layers = [m for m in model.modules() if isinstance(m, fp8.Linear)]
    held = [cache for layer in layers for cache in layer._weight_codes().values()]
    return held, [t for cache in held for q in cache._codes.values() for t in (q.data, q.scale)]


def memory(decoding: Replayed):
    """All that outlives a step, and that a graph may read or write."""
    slots, cache, model = decoding.slots, decoding.cache, decoding.caller.model
    own = [slots.tokens, slots.uniforms, slots.logps, slots.entropies, decoding._rows, cache.codes, cache.scales]
    vocabulary = model.get_output_embeddings().out_features
    own.append(sampling._indices(decoding.sampling.never, vocabulary, decoding.caller.device))
    for p in model.parameters():
        own += [t for q in p.frozen.codes for t in (q.data, q.scale)] if is_frozen(p) else [p]
    own += [*model.buffers(), *codes_of(model)[1], formats._E4M3_SINGLE, formats._E4M3_PAIR]
    return [x for x in own if x is not None]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Caches by kernels, and steps on a tape, or without one, of as many rows. The decoding of each call is noted."""

    def start(tape: bool = True) -> list[Replayed]:
        found: list[Replayed] = []

        class Here(Replayed):
            def __init__(self, *args) -> None:
                super().__init__(*args, graph=lambda: Tape(lambda: memory(self)))
                found.append(self)

            def _capture(self, rows):
                return super()._capture(rows) if tape else None

        monkeypatch.setattr(batch, "Replayed", Here)
        monkeypatch.setattr(kv_cache.kernels, "why_not_paged", lambda device: None)
        return found

    return start


def same(one, other, close: float) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.prompt, a.sample, a.reason, a.tokens.tolist()) == (b.prompt, b.sample, b.reason, b.tokens.tolist())
        assert np.abs(a.logps - b.logps).max() <= close and np.abs(a.entropy - b.entropy).max() <= close


@pytest.mark.parametrize(
    ("family", "kv", "count", "slots"),
    [("qwen3", "bf16", 2, 6), pytest.param("qwen3_vl", "fp8", 3, 4, marks=pytest.mark.long)],
)
def test_tokens_of_replays_are_those_of_eager_steps_and_of_torch(
    made, as_on_a_gpu, monkeypatch, family, kv, count, slots
):
    """Of six sequences, whose pages are shared and copied, one ends early; then sequences come and go, too."""
    model, processor = made(family)
    prompts = prompts_of(model, processor, count)

    def run():
        return Engine(model, processor.tokenizer, slots=slots, page=4, kv=kv).generate(prompts, SAMPLED, group=3)

    ends = [int(run()[0].tokens[1])]
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    plain = run()
    assert plain[0].reason == "stop"
    as_on_a_gpu(tape=False)
    with launches() as ran:
        eager = run()
    assert ran["attend_kernel"] and ran["write_kernel"]
    steps = as_on_a_gpu()
    same(run(), eager, 0.0)
    same(eager, plain, 1e-4)
    assert steps[0].replays >= 2 and set(steps[0]._captured) >= {slots}


def with_adapters(model):
    models.freeze_all(model)
    model = in_fp8(model)
    adapters.attach(model, models.describe(model), LoraSection(rank=4), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))


def in_fp8(model):
    return fp8.apply(model, fp8.plan(model, "rowwise"))


@pytest.mark.parametrize(
    ("change", "load", "autocast"),
    [
        (in_fp8, {}, False),
        pytest.param(with_adapters, {"load_in_fp8": "row"}, False, marks=pytest.mark.long),
        pytest.param(lambda model: None, {}, True, marks=pytest.mark.long),
    ],
    ids=["fp8", "lora", "autocast"],
)
def test_models_as_runs_make_them_are_captured(made, as_on_a_gpu, monkeypatch, change, load, autocast):
    """As on a GPU, where a layer in FP8 would otherwise cast its weight in each replay: it reads cached codes."""
    monkeypatch.setattr("octavo.fp8.weights.cache._is_capturing", lambda weight: recording())
    monkeypatch.setattr("octavo.fp8.arithmetic.cast._can_read_values", lambda tensor: False)
    model, processor = models.load(made("qwen3")[0].name_or_path, **load), made("qwen3")[1]
    change(model)
    prompts, found = prompts_of(model, processor, 1), []
    for tape in (False, True):
        steps = as_on_a_gpu(tape)
        context = Context(torch.bfloat16 if autocast else None)
        engine = Engine(model, processor.tokenizer, context, slots=1, page=4, log=pytest.fail)
        with fp8.count_gemms() as counts:
            found.append(engine.generate(prompts, GREEDY))
        found.append(dict(counts.calls))
    same(found[2], found[0], 0.0)
    assert found[3] == found[1] and bool(found[1]) == (not autocast), "replays report their GEMMs"
    assert steps[0].replays == 2 and all(cache.casts == (change is in_fp8) for cache in codes_of(model)[0])


def test_what_cannot_be_captured_runs_eagerly_and_is_said_once(made, as_on_a_gpu):
    model, processor = made("qwen3")
    prompts, said = prompts_of(model, processor, 1), []
    steps = as_on_a_gpu()
    engine = Engine(model, processor.tokenizer, slots=1, page=4, log=said.append)
    wanted = engine.generate(prompts, GREEDY)
    assert steps[0].replays == 2 and not said
    handle = model.model.norm.register_forward_hook(lambda module, args, out: out * float(out.sum() * 0 + 1))
    try:
        for _ in range(2):
            same(engine.generate(prompts, GREEDY), wanted, 0.0)
    finally:
        handle.remove()
    assert [step.replays for step in steps] == [2, 0, 0] and said == [
        "generation: decodes without a CUDA graph: a step cannot be captured (RuntimeError: _local_scalar_dense waits "
        "for the device)"
    ]


def test_who_watches_sees_every_step(made, as_on_a_gpu):
    model, processor = made("qwen3")
    prompt, steps, seen = prompts_of(model, processor, 1)[0], as_on_a_gpu(), []
    handle = model.model.norm.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    try:
        Engine(model, processor.tokenizer, slots=4, page=4).replay(prompt, np.array([3, 4, 5, 6]))
    finally:
        handle.remove()
    assert seen == [len(prompt.input_ids), 1, 1, 1] and not steps[0].replays


@pytest.mark.parametrize(
    ("change", "ranks", "why"),
    [
        (None, 1, None),
        (None, 2, "2 ranks share the model"),
        (lambda m: fp8.apply(m, fp8.plan(m, "rowwise")), 1, None),
        (lambda m: fp8.apply(m, fp8.plan(m, "tensorwise")), 1, "by tensorwise, whose activations share a scale"),
        (lambda m: m.model.layers[1].compile(), 1, "model.layers.1 is compiled"),
    ],
)
def test_why_no_step_is_captured(made, change, ranks, why):
    model = models.load(made("qwen3")[0].name_or_path)
    if change is not None:
        change(model)
    found = why_eager(SimpleNamespace(model=model, context=replace(Context(), world=SimpleNamespace(size=ranks))))
    assert found is None if why is None else why in str(found)
