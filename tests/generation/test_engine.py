"""The engine compared with transformers' generate, with the model's own forward, and with itself in other batches."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from octavo import fp8, generation, models
from octavo.base.model_families import tiny_families
from octavo.generation import Engine, GenerationError, Prompt, Sampling
from octavo.models.processors import stop_tokens
from tests.generation.conftest import make_conversations, make_prompts

SMALL_SET = ("qwen3_vl_moe", "qwen2_5_vl", "internvl", "llama", "mistral3", "llava_onevision", "smolvlm", "glm4v")
SIMILAR_FAMILIES = ("glm46v", "glm4v_moe", "glm_ocr", "qwen2_vl")
OTHERS = ("ernie4_5_vl_moe", "llava", "llavaonevision1_5", "octavo_vlm", "octavo_llava", "nvila", "nvila_lite", "mpt")
FAMILIES = {
    "qwen3_vl": 64,
    "qwen3": 64,
    "qwen3_moe": 64,
    **dict.fromkeys(
        (*SMALL_SET, *SIMILAR_FAMILIES, *OTHERS),
        6,
    ),
}
TRANSFORMERS_ONLY = ("gemma3", "qwen3_5", "qwen3_5_moe", "qwen2_audio")  # use the loop of transformers
assert {*FAMILIES, *TRANSFORMERS_ONLY} == set(tiny_families())


def stock(model, processor, question, new: int) -> list[int]:
    """Return the greedy tokens of `model.generate`."""
    batch = models.encode_conversation(processor, *question)
    ends = model.generation_config.eos_token_id
    settings = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=ends, pad_token_id=0)
    return model.generate(**batch, generation_config=settings)[0, batch["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_match_transformers(load_mini, family):
    model, processor = load_mini(family)
    count = FAMILIES[family]
    engine = Engine(model, processor.tokenizer, slots=13, page=4)
    completions = engine.generate(make_prompts(model, processor, count), Sampling(5, temperature=0))
    expected = [stock(model, processor, question, 5) for question in make_conversations(model, count)]
    assert [c.tokens.tolist() for c in completions] == expected
    assert len({tuple(tokens) for tokens in expected}) > count // 3


def model_logprobs(model, prompt, completion, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (log-probabilities, entropies) of a completion's tokens, by one forward of the model, in fp64."""
    ids = torch.tensor([[*prompt.input_ids, *completion.tokens]])
    kinds = torch.tensor([[*(prompt.input_ids * 0 if prompt.mm_token_type_ids is None else prompt.mm_token_type_ids)]])
    images = {
        name: torch.from_numpy(value)
        for name in ("pixel_values", "image_grid_thw")
        if (value := getattr(prompt, name)) is not None
    }
    if "image_grid_thw" in images:
        images["mm_token_type_ids"] = nn.functional.pad(kinds, (0, len(completion.tokens)))
    with torch.no_grad():
        logits = model(input_ids=ids, **images, use_cache=False).logits[0, len(prompt.input_ids) - 1 : -1].double()
    logps = torch.log_softmax(logits / temperature, -1)
    chosen = logps.gather(1, torch.from_numpy(completion.tokens)[:, None])[:, 0]
    return chosen.numpy(), torch.special.entr(logps.exp()).sum(-1).numpy()


def in_fp8(model):
    return fp8.apply(model, fp8.plan(model, "rowwise"))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "internvl", "nvila", "nvila_lite", "qwen3_moe"])
@pytest.mark.parametrize("convert", [None, in_fp8], ids=["high", "fp8"])
def test_logprobs_and_entropies_match_the_forward_of_the_model(load_mini, family, convert):
    model, processor = load_mini(family)
    if convert is not None:
        model = convert(models.load(model.name_or_path))
    prompts = make_prompts(model, processor, 4)
    completions = Engine(model, processor.tokenizer, slots=5).generate(
        prompts, Sampling(6, temperature=0.7, top_k=50), group=2
    )
    assert [(c.prompt, c.sample) for c in completions] == [(p, s) for p in range(4) for s in range(2)]
    # in FP8 a difference of 1e-7 may change a code by one step
    tolerance = 1e-4 if convert is None else 0.05
    for completion in completions:
        logps, entropies = model_logprobs(model, prompts[completion.prompt], completion, 0.7)
        assert np.abs(completion.logps - logps).max() < tolerance
        assert np.abs(completion.entropy - entropies).max() < tolerance


@pytest.fixture
def small(load_mini):
    model, processor = load_mini("qwen3_vl")
    return model, processor.tokenizer, make_prompts(model, processor, 6)


SAMPLED = Sampling(9, temperature=1.0, top_p=0.95, seed=3, step=7)


def is_same(first, second, tolerance: float = 1e-5) -> bool:
    return all(
        (a.prompt, a.sample, a.reason) == (b.prompt, b.sample, b.reason)
        and a.tokens.tolist() == b.tokens.tolist()
        and np.abs(a.logps - b.logps).max() < tolerance
        for a, b in zip(first, second, strict=True)
    )


def test_completions_do_not_depend_on_the_batch(small, monkeypatch):
    model, tokenizer, prompts = small
    monkeypatch.setattr(model.generation_config, "eos_token_id", list(range(0, 512, 8)))  # some sequences end early
    reference = Engine(model, tokenizer, slots=64).generate(prompts, SAMPLED, group=4)
    assert len({tuple(c.tokens) for c in reference}) > 20 and len({len(c.tokens) for c in reference}) > 4
    for slots, page, pages in ((1, 4, None), (3, 3, None), (7, 16, None), (7, 4, 30), (5, 64, 3)):
        engine = Engine(model, tokenizer, slots=slots, page=page, pages=pages)
        assert is_same(engine.generate(prompts, SAMPLED, group=4), reference), (slots, page, pages)
    monkeypatch.setattr("octavo.generation.batch.PREFILL", 1)  # one prompt at a time
    # another order, and only some of the prompts and samples
    reversed_order = Engine(model, tokenizer, slots=6).generate(prompts[::-1], SAMPLED, group=4)
    restored = [replace(c, prompt=5 - c.prompt) for c in reversed_order]
    assert is_same(sorted(restored, key=lambda c: (c.prompt, c.sample)), reference)
    subset = Engine(model, tokenizer, slots=6).generate(prompts[4:], SAMPLED, group=2)
    expected = [replace(c, prompt=c.prompt - 4) for c in reference if c.prompt > 3 and c.sample < 2]
    assert is_same(subset, expected)


def test_prefill_stays_within_its_limit_after_padding(load_mini, monkeypatch):
    """Attention pads prompts to one length, so a long prompt among short ones counts as many long ones."""
    from octavo.generation.attention import Prefill

    model, processor = load_mini("qwen3")
    call, seen = Prefill.__call__, []
    monkeypatch.setattr(
        Prefill, "__call__", lambda self, layer, *x: (seen.append(self.lengths), call(self, layer, *x))[1]
    )
    monkeypatch.setattr("octavo.generation.batch.PREFILL", 64)
    prompts = [Prompt(np.arange(n) % 200 + 5) for n in (5, 5, 40, *[6] * 12, 70, 5)]
    Engine(model, processor.tokenizer, slots=32).generate(prompts, Sampling(1))
    lengths = seen[:: model.config.num_hidden_layers]
    assert sum(lengths, []) == [len(prompt.input_ids) for prompt in prompts]
    assert all(len(row) == 1 or len(row) * max(row) <= 64 for row in lengths)
    assert max(map(len, lengths)) == 10


@pytest.mark.parametrize("other", [{"seed": 4}, {"step": 8}])
def test_seed_and_step_change_completions(small, other):
    model, tokenizer, prompts = small
    first, second = (
        Engine(model, tokenizer, slots=8).generate(prompts[:2], sampling, group=2)
        for sampling in (SAMPLED, replace(SAMPLED, **other))
    )
    assert all(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(first, second, strict=True))


def test_stop_conditions_are_cached_per_engine(small, monkeypatch):
    model, tokenizer, prompts = small
    calls, stop_ids = [], stop_tokens.stop_ids
    monkeypatch.setattr(stop_tokens, "stop_ids", lambda *args: calls.append(args) or stop_ids(*args))
    engine = Engine(model, tokenizer, slots=1)
    for stop in ((), (), ("a",)):
        engine.generate(prompts[:1], Sampling(1, temperature=0, stop=stop))
    assert len(calls) == 2, "once per set of stop texts"


def test_prompt_and_images_run_once_per_group(small):
    model, tokenizer, prompts = small
    tokens, patches = [], []
    handles = [
        model.get_input_embeddings().register_forward_hook(lambda m, args, out: tokens.append(args[0].numel())),
        model.model.visual.register_forward_hook(lambda m, args, out: patches.append(len(args[0]))),
    ]
    try:
        completions = Engine(model, tokenizer, slots=3, page=4).generate(prompts, SAMPLED, group=4)
    finally:
        for handle in handles:
            handle.remove()
    assert sum(tokens) == sum(len(p.input_ids) for p in prompts) + sum(len(c.tokens) - 1 for c in completions)
    assert sum(patches) == sum(len(p.pixel_values) for p in prompts if p.images)


def test_pages_are_shared_copied_on_write_and_released(small, monkeypatch):
    from octavo.generation import batch
    from octavo.generation import kv_cache as pages

    pools, copied = [], []
    step, copy = batch.Batch._step, pages.Cache.copy
    monkeypatch.setattr(batch.Batch, "_step", lambda self, active: (step(self, active), pools.append(self.pool)))
    monkeypatch.setattr(pages.Cache, "copy", lambda self, *which: (copied.append(len(which[0])), copy(self, *which)))
    model, tokenizer, prompts = small
    prompt = next(p for p in prompts if len(p.input_ids) % 4)
    full = len(prompt.input_ids) // 4
    engine = Engine(model, tokenizer, slots=4, page=4)
    sampling = Sampling(2, temperature=1.0)
    model.generation_config.eos_token_id, before = [], model.generation_config.eos_token_id
    try:
        engine.generate([prompt], sampling, group=4)
    finally:
        model.generation_config.eos_token_id = before
    assert copied == [4]
    assert engine.cache.pages == 2 * full + 4 * 1 + 1  # including a second prompt whose samples could start
    assert pools[-1].free == engine.cache.pages - 4 and len(set(pools[-1].take(2 * full + 1))) == 2 * full + 1


def test_completions_end_by_token_text_or_length(small, load_mini):
    model, tokenizer, prompts = small
    plain = Engine(model, tokenizer, slots=8).generate(prompts, Sampling(9, temperature=0))[0]
    assert plain.reason == "length" and len(plain.tokens) == len(plain.logps) == len(plain.entropy) == 9
    before = model.generation_config.eos_token_id
    first = int(np.flatnonzero(plain.tokens == plain.tokens[4])[0])
    model.generation_config.eos_token_id = [int(plain.tokens[4])]
    try:
        ended = Engine(model, tokenizer, slots=8).generate(prompts, Sampling(9, temperature=0))[0]
    finally:
        model.generation_config.eos_token_id = before
    assert ended.reason == "stop" and ended.tokens.tolist() == plain.tokens[: first + 1].tolist()
    word = tokenizer.decode(plain.tokens[2:4].tolist())
    stopped = Engine(model, tokenizer, slots=8).generate(prompts, Sampling(9, temperature=0, stop=(word, "nowhere")))[0]
    assert stopped.reason == "stop_string" and stopped.tokens.tolist() == plain.tokens[: len(stopped.tokens)].tolist()
    assert word in tokenizer.decode(stopped.tokens.tolist()) and len(stopped.tokens) <= 4
    assert word not in tokenizer.decode(stopped.tokens[:-1].tolist())


def test_model_is_unchanged_after_generation(small):
    model, tokenizer, prompts = small
    parameters = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
    attention = [m.config._attn_implementation for m in (model, model.model.language_model, model.model.visual)]
    model.train()
    try:
        engine = Engine(model, tokenizer, slots=8)
        engine.generate(prompts, SAMPLED)
        assert model.training and model.model.language_model.training
        with pytest.raises(RuntimeError, match="stop here"):
            engine.generate(prompts, SAMPLED, progress=stop_here)
        assert model.training
    finally:
        model.eval()
    assert parameters == {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
    assert attention == [m.config._attn_implementation for m in (model, model.model.language_model, model.model.visual)]
    assert engine.bytes["cache"] == engine.cache.nbytes > 0
    engine.release()
    assert engine.cache is None and not engine.bytes


def test_model_can_be_freed_after_generation(load_mini):
    folder, processor = load_mini("qwen3")[0].name_or_path, load_mini("qwen3")[1]
    model = models.load(folder)
    Engine(model, processor.tokenizer, slots=1).generate(make_prompts(model, processor, 1), Sampling(2))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def stop_here(done: int, total: int) -> None:
    raise RuntimeError("stop here")


def test_progress_is_reported_and_no_prompts_are_accepted(small):
    model, tokenizer, prompts = small
    engine, seen = Engine(model, tokenizer, slots=2), []
    assert engine.generate([], SAMPLED) == []
    engine.generate(prompts[:3], SAMPLED, group=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (6, 6) and len(seen) > 6


def test_bf16_model_and_autocast_are_close_to_fp32(load_mini):
    family, processor = (
        models.load(load_mini("qwen3_vl")[0].name_or_path, dtype=torch.bfloat16),
        load_mini("qwen3_vl")[1],
    )
    prompts = make_prompts(family, processor, 3)
    bf16 = Engine(family, processor.tokenizer, slots=4)
    wide = load_mini("qwen3_vl")[0]
    autocast = Engine(wide, processor.tokenizer, generation.Context(autocast=torch.bfloat16), slots=4)
    exact = Engine(wide, processor.tokenizer, slots=4).generate(prompts, Sampling(1, temperature=0))
    for engine in (bf16, autocast):
        completions = engine.generate(prompts, Sampling(1, temperature=0))
        assert engine.cache.codes.dtype == torch.bfloat16
        assert max(abs(a.entropy[0] - b.entropy[0]) for a, b in zip(completions, exact, strict=True)) < 0.1


def test_attention_scores_are_fp32_under_autocast(small, monkeypatch):
    """As in torch's attention: keys, values and the output are BF16, and scores are fp32."""
    from octavo.generation.attention import Decode

    model, tokenizer, prompts = small
    call, dtypes = Decode.__call__, []

    def record_dtype(self, layer, q, k, v, scale):
        dtypes.append((q.float() @ k.float().transpose(1, 2)).dtype)
        return call(self, layer, q, k, v, scale)

    monkeypatch.setattr(Decode, "__call__", record_dtype)
    engine = Engine(model, tokenizer, generation.Context(autocast=torch.bfloat16), slots=4)
    engine.generate(prompts[:1], Sampling(3, temperature=0))
    assert engine.cache.codes.dtype == torch.bfloat16 and set(dtypes) == {torch.float32}


def test_cache_in_huge_pages_gives_the_same_completions(small, monkeypatch):
    from octavo.generation import kv_cache as pages

    model, tokenizer, prompts = small
    plain = Engine(model, tokenizer, slots=8, kv="fp8").generate(prompts, SAMPLED)
    monkeypatch.setattr(pages, "_HUGE", 1)
    engine = Engine(model, tokenizer, slots=8, kv="fp8")
    assert is_same(engine.generate(prompts, SAMPLED), plain)
    assert engine.bytes["cache"] == engine.cache.nbytes == predicted_cache(engine)


def predicted_cache(engine) -> int:
    shape, cache = engine.caller.shape, engine.cache
    return shape.layers * 2 * shape.heads * cache.pages * cache.page * (shape.dim + 4)


def test_fp8_cache_contains_casts_of_the_bf16_cache(small):
    model, tokenizer, prompts = small
    bf16, in_fp8_cache = (Engine(model, tokenizer, slots=2, kv=kv) for kv in ("bf16", "fp8"))
    completions = [engine.generate(prompts[:2], Sampling(1, temperature=0)) for engine in (bf16, in_fp8_cache)]
    assert is_same(*completions)  # a prompt attends to itself before it is cast
    x = bf16.cache.codes[0].flatten(0, 1)
    quantized = fp8.quantize(x, fp8.CastSpec("e4m3", block=(1, -1), scale="fp32"))
    written = x.abs().amax(1) > 0
    assert written.sum() > 20
    codes, scales = in_fp8_cache.cache.codes[0].flatten(0, 1), in_fp8_cache.cache.scales[0].flatten()
    assert torch.equal(codes.view(torch.uint8)[written], quantized.data.view(torch.uint8)[written])
    assert torch.equal(scales[written], quantized.scale[written, 0])
    long = [engine.generate(prompts, Sampling(8, temperature=0)) for engine in (bf16, in_fp8_cache)]
    first = [abs(a.logps[1] - b.logps[1]) for a, b in zip(*long, strict=True) if a.tokens[0] == b.tokens[0]]
    assert 0 < max(first) < 0.2


def test_copied_pages_include_their_scales(small):
    """Samples of a prompt that ends within a page equal those of single sequences, in FP8."""
    model, tokenizer, prompts = small
    prompt = next(p for p in prompts if len(p.input_ids) % 4)
    single, samples = (
        Engine(model, tokenizer, slots=4, page=4, kv="fp8").generate([prompt], Sampling(4, temperature=0), group)
        for group in (1, 3)
    )
    for sample in samples:
        assert sample.tokens.tolist() == single[0].tokens.tolist()
        assert np.abs(sample.logps - single[0].logps).max() < 1e-4


def test_minimum_number_of_pages(small):
    """The full pages of the prompt, and a run for the rest of the prompt and the new tokens."""
    model, tokenizer, prompts = small
    prompt = next(p for p in prompts if len(p.input_ids) % 4)
    pages = -(-len(prompt.input_ids) // 4) + -(-(3 + 3 - 1) // 4)
    expected = Engine(model, tokenizer, slots=4).generate([prompt], Sampling(3, seed=1), group=2)
    for group in (1, 2):
        engine = Engine(model, tokenizer, slots=4, page=4, pages=pages)
        assert is_same(engine.generate([prompt], Sampling(3, seed=1), group), expected[:group])
        with pytest.raises(GenerationError, match=f"has {pages - 1} pages of 4 tokens.* may need {pages} "):
            Engine(model, tokenizer, slots=4, page=4, pages=pages - 1).generate([prompt], Sampling(3, seed=1), group)


def broken(model):
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = torch.nan
    return model


def with_alibi(model):
    model.config.attn_config["alibi"] = True
    return model


@pytest.mark.parametrize(
    ("family", "make", "settings", "change", "message"),
    [
        ("qwen3_vl", None, {"pages": 2, "page": 4}, {}, r"has 2 pages of 4 tokens.* one sequence of prompt 0 may need"),
        (
            "qwen3_vl",
            None,
            {},
            {"new": 4096},
            r"prompt 0 has \d+ tokens and may get 4096 more.* context is 4096 tokens",
        ),
        ("qwen3_vl", None, {}, {"group": 0}, "group is 0"),
        ("qwen3", None, {}, {"images": 2}, "prompt 1 has 2 images, but Qwen3ForCausalLM is text-only"),
        ("qwen3", None, {}, {"token": 99999}, r"prompt 1 contains the token 99999.* vocabulary has \d+"),
        ("qwen3", broken, {}, {}, "returned NaN or infinity as a logit of token 1 after prompt 0"),
        ("mpt", with_alibi, {}, {}, "model_type 'mpt' adds ALiBi's bias to its scores"),
        ("qwen3", None, {"slots": 0}, {}, "slots=0"),
        ("qwen3", None, {"kv": "int8"}, {}, "kv='int8'"),
    ],
)
def test_invalid_requests_are_rejected(load_mini, family, make, settings, change, message):
    model, processor = load_mini(family)
    model = models.load(model.name_or_path) if make else model
    prompts = make_prompts(model, processor, 2)
    if images := change.get("images"):
        prompts[1] = replace(prompts[1], images=images, pixel_values=np.zeros((1, 4), dtype=np.float32))
    if token := change.get("token"):
        prompts[1] = replace(prompts[1], input_ids=np.array([token]))
    model = make(model) if make else model
    with pytest.raises(GenerationError, match=message):
        engine = Engine(model, processor.tokenizer, **{"slots": 4, **settings})
        engine.generate(prompts, Sampling(change.get("new", 3)), change.get("group", 2))


def test_text_models_reject_images_and_custom_attention_uses_transformers(load_mini):
    model, processor = load_mini("qwen3")
    messages, images = make_conversations(model, 1)[0][0], make_conversations(load_mini("qwen3_vl")[0], 2)[1][1]
    with pytest.raises(models.ModelError, match="a text-only model received 1 image"):
        generation.prompt_of(processor, messages, images)
    model, processor = load_mini("mpt")
    model = with_alibi(models.load(model.name_or_path))
    logged: list[str] = []
    greedy = Sampling(3, temperature=0)
    completions = generation.answers(model, processor, [(messages, [])], greedy, log=logged.append)
    assert completions == [[models.generate(model, processor, messages, [], 3)]] and "adds ALiBi's bias" in logged[0]
    with pytest.raises(GenerationError, match="only greedy decoding is possible"):
        generation.answers(model, processor, [(messages, [])], Sampling(3))


def test_answers_are_cut_at_the_stop_text(load_mini):
    model, processor = load_mini("qwen3")
    conversations = make_conversations(model, 1)
    full = generation.answers(model, processor, conversations, Sampling(9, temperature=0))[0][0]
    cut = generation.answers(model, processor, conversations, Sampling(9, temperature=0, stop=(full[3:5],)))[0][0]
    assert full.startswith(cut) and full[3:5] not in cut


@pytest.mark.long
def test_rollout_on_triton_uses_the_decode_kernel(load_mini):
    """In Triton's interpreter, for prompts and new tokens, with the results of the reference."""
    launch = pytest.importorskip("octavo.fp8.kernels.triton_kernels.launch")
    if not launch.INTERPRETED:
        pytest.skip("tests/gpu holds the compiled kernels to the is_same")
    model, processor = load_mini("qwen3")
    prompts, completions = make_prompts(model, processor, 2), {}
    for backend in ("triton", "reference"):
        converted = models.load(model.name_or_path)
        fp8.apply(converted, fp8.plan(converted, fp8.Policy(recipe="rowwise", backend=backend)))
        layers = sum(isinstance(module, fp8.Linear) for module in converted.modules())
        with launch.launches() as launched, fp8.count_gemms() as counts:
            completions[backend] = Engine(converted, processor.tokenizer, slots=2).generate(
                prompts, Sampling(3, temperature=0)
            )
        assert launched["decode_kernel"] == (3 * layers if backend == "triton" else 0) and not launched["gemm_kernel"]
        in_fp8 = {key: n for key, n in counts.calls.items() if key[2] != "high"}
        assert {key[1:] for key in in_fp8} == {("fwd", backend)} and sum(in_fp8.values()) == 3 * layers
    assert is_same(completions["triton"], completions["reference"], tolerance=0.05)


def test_longrope_is_rejected(load_mini):
    """longrope chooses its factors by the longest sequence of a call."""
    config = models.tiny_config("llama")
    half = config.hidden_size // config.num_attention_heads // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [8.0] * half, "original_max_position_embeddings": 64}
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 64.0, **factors}
    with pytest.raises(GenerationError, match="uses longrope.* longer than 64 tokens .* depend on the batch"):
        Engine(AutoModelForCausalLM.from_config(config), load_mini("qwen3")[1].tokenizer, slots=2)
