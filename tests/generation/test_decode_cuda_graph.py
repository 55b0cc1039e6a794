"""GPU decoding on a CPU: cache kernels in Triton's interpreter, and steps recorded and replayed."""

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
from octavo.generation.decode_cuda_graph import CudaGraphDecoder, why_eager
from tests.generation.conftest import make_prompts
from tests.generation.tape import Tape, recording

SAMPLED = Sampling(4, temperature=1.0, top_p=0.9, top_k=60, min_p=0.01, seed=3, excluded=(5, 9))
GREEDY = Sampling(4, temperature=0)


def codes_of(model):
    """Return the weight caches of FP8 layers, and their tensors."""
    layers = [m for m in model.modules() if isinstance(m, fp8.Linear)]
    caches = [cache for layer in layers for cache in layer._weight_caches().values()]
    return caches, [t for cache in caches for q in cache._codes.values() for t in (q.data, q.scale)]


def memory(decoding: CudaGraphDecoder):
    """Return all tensors that outlive a step and that a graph may read or write."""
    slots, cache, model = decoding.slots, decoding.cache, decoding.caller.model
    tensors = [slots.tokens, slots.uniforms, slots.logps, slots.entropies, decoding._rows, cache.codes, cache.scales]
    vocabulary = model.get_output_embeddings().out_features
    tensors.append(sampling._indices(decoding.sampling.excluded, vocabulary, decoding.caller.device))
    for p in model.parameters():
        tensors += [t for q in p.frozen.codes for t in (q.data, q.scale)] if is_frozen(p) else [p]
    tensors += [*model.buffers(), *codes_of(model)[1], formats._E4M3_SINGLE, formats._E4M3_PAIR]
    return [x for x in tensors if x is not None]


@pytest.fixture
def use_gpu_decoding(monkeypatch):
    """Use cache kernels, and capture steps on a tape or not at all. The decoders of all calls are collected."""

    def start(tape: bool = True) -> list[CudaGraphDecoder]:
        decoders: list[CudaGraphDecoder] = []

        class RecordingDecoder(CudaGraphDecoder):
            def __init__(self, *args) -> None:
                super().__init__(*args, graph=lambda: Tape(lambda: memory(self)))
                decoders.append(self)

            def _capture(self, rows):
                return super()._capture(rows) if tape else None

        monkeypatch.setattr(batch, "CudaGraphDecoder", RecordingDecoder)
        monkeypatch.setattr(kv_cache.kernels, "why_not_paged", lambda device: None)
        return decoders

    return start


def assert_same(first, second, tolerance: float) -> None:
    for a, b in zip(first, second, strict=True):
        assert (a.prompt, a.sample, a.reason, a.tokens.tolist()) == (b.prompt, b.sample, b.reason, b.tokens.tolist())
        assert np.abs(a.logps - b.logps).max() <= tolerance and np.abs(a.entropy - b.entropy).max() <= tolerance


@pytest.mark.parametrize(
    ("family", "kv", "count", "slots"),
    [("qwen3", "bf16", 2, 6), pytest.param("qwen3_vl", "fp8", 3, 4, marks=pytest.mark.long)],
)
def test_replays_match_eager_steps_and_torch(load_mini, use_gpu_decoding, monkeypatch, family, kv, count, slots):
    """Six sequences share and copy pages and one ends early; with fewer slots, sequences also join and leave."""
    model, processor = load_mini(family)
    prompts = make_prompts(model, processor, count)

    def run():
        return Engine(model, processor.tokenizer, slots=slots, page=4, kv=kv).generate(prompts, SAMPLED, group=3)

    ends = [int(run()[0].tokens[1])]
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    plain = run()
    assert plain[0].reason == "stop"
    use_gpu_decoding(tape=False)
    with launches() as ran:
        eager = run()
    assert ran["attend_kernel"] and ran["write_kernel"]
    steps = use_gpu_decoding()
    assert_same(run(), eager, 0.0)
    assert_same(eager, plain, 1e-4)
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
def test_fp8_lora_and_autocast_models_are_captured(load_mini, use_gpu_decoding, monkeypatch, change, load, autocast):
    """As on a GPU, FP8 layers read cached codes instead of casting the weight in each replay."""
    monkeypatch.setattr("octavo.fp8.weights.cache._is_capturing", lambda weight: recording())
    monkeypatch.setattr("octavo.fp8.arithmetic.cast._can_read_values", lambda tensor: False)
    model, processor = models.load(load_mini("qwen3")[0].name_or_path, **load), load_mini("qwen3")[1]
    change(model)
    prompts, results = make_prompts(model, processor, 1), []
    for tape in (False, True):
        steps = use_gpu_decoding(tape)
        context = Context(torch.bfloat16 if autocast else None)
        engine = Engine(model, processor.tokenizer, context, slots=1, page=4, log=pytest.fail)
        with fp8.count_gemms() as counts:
            results.append(engine.generate(prompts, GREEDY))
        results.append(dict(counts.calls))
    assert_same(results[2], results[0], 0.0)
    assert results[3] == results[1] and bool(results[1]) == (not autocast), "replays report their GEMMs"
    assert steps[0].replays == 2 and all(cache.casts == (change is in_fp8) for cache in codes_of(model)[0])


def test_step_that_cannot_be_captured_runs_eagerly_and_is_logged_once(load_mini, use_gpu_decoding):
    model, processor = load_mini("qwen3")
    prompts, messages = make_prompts(model, processor, 1), []
    steps = use_gpu_decoding()
    engine = Engine(model, processor.tokenizer, slots=1, page=4, log=messages.append)
    expected = engine.generate(prompts, GREEDY)
    assert steps[0].replays == 2 and not messages
    handle = model.model.norm.register_forward_hook(lambda module, args, out: out * float(out.sum() * 0 + 1))
    try:
        for _ in range(2):
            assert_same(engine.generate(prompts, GREEDY), expected, 0.0)
    finally:
        handle.remove()
    assert [step.replays for step in steps] == [2, 0, 0] and messages == [
        "generation: decodes without a CUDA graph: a step cannot be captured (RuntimeError: _local_scalar_dense waits "
        "for the device)"
    ]


def test_hooks_run_in_every_step_of_a_replay(load_mini, use_gpu_decoding):
    model, processor = load_mini("qwen3")
    prompt, steps, widths = make_prompts(model, processor, 1)[0], use_gpu_decoding(), []
    handle = model.model.norm.register_forward_hook(lambda module, args, out: widths.append(out.shape[1]))
    try:
        Engine(model, processor.tokenizer, slots=4, page=4).replay(prompt, np.array([3, 4, 5, 6]))
    finally:
        handle.remove()
    assert widths == [len(prompt.input_ids), 1, 1, 1] and not steps[0].replays


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
def test_why_eager_names_the_reason(load_mini, change, ranks, why):
    model = models.load(load_mini("qwen3")[0].name_or_path)
    if change is not None:
        change(model)
    reason = why_eager(SimpleNamespace(model=model, context=replace(Context(), world=SimpleNamespace(size=ranks))))
    assert reason is None if why is None else why in str(reason)
