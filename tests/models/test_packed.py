"""Packed rows: each sample's logits and gradients are those that it has alone, for every family and in every way that
could mix them."""

from __future__ import annotations

import contextlib
from itertools import accumulate

import numpy as np
import pytest
import torch
from transformers import DynamicCache, MptConfig, MptForCausalLM, Qwen3NextConfig

from octavo import fp8, models
from octavo.base.model_families import tiny_families
from octavo.data.encoding.sample import concatenate as stacked
from octavo.fp8.blocks.attention import grouped_attention
from octavo.models import ModelError
from octavo.models.attention import segments
from octavo.models.forward import packed
from tests.models.conftest import conversation, some_image

APART = (
    "mpt",
    "gemma3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen2_audio",
)  # in fp64 (test_mpt.py), both ways, recurrences, sound
FAMILIES = [f for f in tiny_families() if f not in APART]
KINDS = ("mm_token_type_ids", "moe_mm_token_type_ids")  # of tokens
PADDING = 5


@pytest.fixture(scope="module")
def loaded(checkpoint):
    """family -> (model, description, samples): text, an image, one token, two images, two tokens."""
    created = {}

    def get(family: str):
        if family not in created:
            model = models.load(checkpoint(family)).train()
            processor = models.load_processor(checkpoint(family))
            described = models.describe(model)
            image = described.has_vision
            samples = [
                sample_of(processor, some_image(n, (16 + 8 * n, 24)) if image and n % 2 else None) for n in range(4)
            ]
            short = [{"input_ids": samples[0]["input_ids"][:, :n]} for n in (1, 2)]
            created[family] = model, described, [*samples[:2], short[0], samples[3], short[1], samples[2]]
        model, described, samples = created[family]
        model.set_attn_implementation("sdpa")
        return model, described, samples

    return get


def sample_of(processor, image) -> dict:
    """Two questions with answers, with or without an image."""
    text = processor.apply_chat_template(conversation(image is not None), tokenize=False)
    actual = processor(text=[text], images=image and [image], return_tensors="pt", add_special_tokens=False)
    return {key: value for key, value in actual.items() if key != "attention_mask"}


def joined(samples, padding: int = PADDING):
    """Return (inputs of a pack, its edges, images per sample); the last segment is padding."""
    ids = [sample["input_ids"] for sample in samples] + [torch.zeros(1, padding, dtype=torch.int64)] * bool(padding)
    inputs = {"input_ids": torch.cat(ids, 1)}
    for key in dict.fromkeys(key for sample in samples for key in sample if key not in (*KINDS[:1], "input_ids")):
        if key in KINDS:
            own = [sample.get(key, torch.zeros_like(x)) for sample, x in zip([*samples, {}], ids, strict=False)]
            inputs[key] = torch.cat(own, 1)
        else:
            inputs[key] = torch.from_numpy(stacked(s[key].numpy() for s in samples if key in s))
    return inputs, [0, *accumulate(x.shape[1] for x in ids)], [int("pixel_values" in sample) for sample in samples]


def of_pack(model, family, samples, **more):
    """Return the logits of a pack per sample."""
    inputs, edges, images = joined(samples)
    forms = packed.Packed(model, family)
    positions = forms.positions(edges, inputs["input_ids"], images, None, inputs.get("image_grid_thw"))
    with forms.forward(edges, positions):
        logits = model(**inputs, position_ids=positions, use_cache=False, **more).logits
    return [logits[:, a:b] for a, b in zip(edges, edges[1 : len(samples) + 1], strict=False)]


def step(model, forward):
    """Return (logits per sample, gradients) of a loss that depends on every logit."""
    model.zero_grad()
    parts = forward()
    sum(part.float().square().mean() for part in parts).backward()
    return [part.detach() for part in parts], {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def alone(model, samples):
    return [model(**sample, use_cache=False).logits for sample in samples]


def same(found, wanted, logits=2e-6, grads=1e-6):
    for actual_value, own in zip(found[0], wanted[0], strict=True):
        assert float((actual_value - own).abs().max()) <= logits
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        assert float((found[1][name] - grad).abs().max()) <= grads * max(1.0, float(grad.abs().max())), name


@pytest.mark.parametrize("family", FAMILIES)
def test_pack_equals_separate_samples(loaded, family):
    model, described, samples = loaded(family)
    wanted = step(model, lambda: alone(model, samples))
    same(step(model, lambda: of_pack(model, described, samples)), wanted)


def test_layers_that_mix_samples_are_detected(loaded):
    """The comparison of these tests detects samples that attend to each other."""
    model, _, samples = loaded("qwen3")
    inputs, edges, _ = joined(samples)
    mixed = model(**inputs, use_cache=False).logits[:, edges[1] : edges[2]]
    assert float((mixed - alone(model, samples)[1]).abs().max().detach()) > 1e-2


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe"])
def test_recomputed_blocks_use_segments_of_their_pack(checkpoint, loaded, family, how):
    """Two forwards of packs, then both backwards: recomputed blocks use the segments of their own pack."""
    _, _, samples = loaded(family)
    first, second = samples[:3], list(reversed(samples[1:]))
    model = models.load(checkpoint(family)).train()
    described = models.describe(model)

    def both():
        return [*of_pack(model, described, first), *of_pack(model, described, second)]

    wanted = step(model, both)
    models.use_attention(model, grouped_attention)
    fp8.activation_checkpointing(described.layers(model), how)
    same(step(model, both), wanted, grads=5e-6)


def test_packed_forward_rejects_cache_and_ignores_mask(loaded):
    """Both make transformers silently treat the pack as one sample."""
    model, family, samples = loaded("qwen3_vl")
    inputs, edges, images = joined(samples)
    forms = packed.Packed(model, family)
    positions = forms.positions(edges, inputs["input_ids"], images, None, inputs["image_grid_thw"])

    def logits(**more):
        with torch.no_grad(), forms.forward(edges, positions):
            return model(**inputs, **{"position_ids": positions, "use_cache": False, **more}).logits

    wanted = logits()
    assert torch.equal(logits(attention_mask=torch.ones_like(inputs["input_ids"])), wanted)
    assert torch.equal(logits(use_cache=True), wanted)
    # positions of three axes, and a first row that stands still in images: no mask is made of them here
    assert torch.equal(logits(position_ids=positions[1:]), wanted)
    assert torch.equal(logits(position_ids=torch.cat([positions[1:2], positions[1:]])), wanted)
    filled = DynamicCache(config=model.config.get_text_config())
    with torch.no_grad():
        model(input_ids=samples[0]["input_ids"], past_key_values=filled, use_cache=True)
    with pytest.raises(ModelError, match="a key-value cache"):
        logits(past_key_values=filled, use_cache=True)


def test_positions_that_do_not_restart_per_sample_are_rejected(loaded):
    model, family, samples = loaded("qwen3_vl")
    inputs, edges, images = joined(samples)
    forms = packed.Packed(model, family)
    right = forms.positions(edges, inputs["input_ids"], images, None, inputs["image_grid_thw"])
    assert list(right.shape) == [4, 1, edges[-1]]
    temporal = torch.cat([right[1:2], right[1:]])
    running = torch.arange(edges[-1]).expand(4, 1, -1)
    for wrong in (None, right[1:], right[0], temporal, running):
        with pytest.raises(ModelError, match=r"compute them with Packed\.positions"), forms.forward(edges, wrong):
            pass
    model, family, _ = loaded("qwen3")
    with pytest.raises(ModelError, match="got"), packed.Packed(model, family).forward(edges, right):
        pass


def test_layers_that_ignore_segments_are_counted(loaded):
    model, family, samples = loaded("qwen3")
    forms = packed.Packed(model, family)
    inputs, edges, _ = joined(samples)
    positions = forms.positions(edges, inputs["input_ids"])
    model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match="0 of the 2 layers"), torch.no_grad(), forms.forward(edges, positions):
        model(**inputs, position_ids=positions, use_cache=False)


def test_attention_beyond_a_softmax_is_rejected(loaded):
    model, family, samples = loaded("qwen3")
    forms = packed.Packed(model, family)
    inputs, edges, _ = joined(samples)
    positions = forms.positions(edges, inputs["input_ids"])
    for window in (4, None):
        model.model.layers[1].self_attn.sliding_window = window
        refused = pytest.raises(ModelError, match="uses sliding_window in the attention of a packed row")
        with refused if window else contextlib.nullcontext(), torch.no_grad(), forms.forward(edges, positions):
            model(**inputs, position_ids=positions, use_cache=False)


def test_rows_of_several_samples_are_one_row(loaded):
    model, family, samples = loaded("qwen3")
    forms = packed.Packed(model, family)
    inputs, edges, _ = joined(samples)
    positions = forms.positions(edges, inputs["input_ids"])
    twice = inputs["input_ids"].expand(2, -1)
    with pytest.raises(ModelError, match="was passed to attention with 2 rows"), forms.forward(edges, positions):
        model(input_ids=twice, position_ids=positions, use_cache=False)


def test_models_whose_samples_would_not_be_separate_are_refused(checkpoint, loaded):
    assert models.why_not_packed(models.empty(checkpoint("qwen3"))) is None
    recurrent = Qwen3NextConfig(num_hidden_layers=4, num_experts=2, vocab_size=64)
    assert "in model_type 'gemma3'" in str(models.why_not_packed(models.empty(checkpoint("gemma3"))))
    assert "linear_attention, whose state continues" in models.why_not_packed(models.empty(recurrent))
    for changes, why in (
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of type sliding_attention"),
        ({"layer_types": ["chunked_attention"]}, "layers of type chunked_attention"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 8}, "only 8 earlier tokens"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "angles depend on the longest sample"),
    ):
        model = models.empty(checkpoint("qwen3"))
        for key, value in changes.items():
            setattr(model.config, key, value)
        assert why in models.why_not_packed(model)
    own = MptForCausalLM(MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=16))
    with pytest.raises(ModelError, match="computes attention in its own way"):
        packed.Packed(own, models.describe(own))
    model, family, _ = loaded("qwen3")
    model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match="only 'sdpa' can be replaced"):
        packed.Packed(model, family)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
@pytest.mark.long
def test_flex_attention_equals_sdpa(loaded, name):
    """One call for all samples, forward only because it has no backward on a CPU. Shared rows too."""
    model, family, _ = loaded(name)
    edges = (0, 37, 38, 150, 161)
    ids = torch.arange(edges[-1])[None] % 90 + 5

    def logits():
        one = packed.Packed(model, family)
        positions = one.positions(edges, ids)
        with torch.no_grad(), one.forward(edges, positions):
            return model(input_ids=ids, position_ids=positions, use_cache=False).logits

    wanted = logits()
    models.use_kernel(model, "flex", "foundation")
    assert torch.allclose(logits(), wanted, atol=1e-5) and not torch.equal(logits(), wanted)

    class Late:
        local_slice, query_range = staticmethod(lambda length: slice(0, 9)), staticmethod(lambda length: (5, 8))

    seen = segments.Segments.from_edges((0, 4, 7, 9), share=Late()).blocks
    mask = [[bool(seen.mask_mod(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(4)] for q in range(3)]
    assert mask == [[True, True, False, False], [True, True, True, False], [False, False, False, True]]


@pytest.mark.parametrize("window", [True, False])
def test_flash_attention_gets_every_sample_in_one_call(monkeypatch, window):
    """Uses a fake with the arguments of torch's function, in both versions of its signature."""
    import torch.nn.attention.varlen as varlen

    def apart(q, k, v, edges, keys, most, scale, causal):
        """Bottom-right alignment: the last query of a span attends to all of its keys."""
        ends = [x.tolist() for x in (edges, keys)]
        assert edges.dtype == keys.dtype == torch.int32 and most == tuple(max(np.diff(x)) for x in ends)
        parts = []
        for a, b, c, d in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a)) if causal else None
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q[a:b].transpose(0, 1), *(x[c:d].transpose(0, 1) for x in (k, v)), seen, scale=scale,
                    enable_gqa=True,
                )
            )  # fmt: skip
        return torch.cat(parts, 1).transpose(0, 1)

    def newer(q, k, v, cq, ck, mq, mk, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return apart(q, k, v, cq, ck, (mq, mk), scale, window_size == (-1, 0))

    def older(q, k, v, cq, ck, mq, mk, is_causal=False):
        assert k.shape[1] == q.shape[1]
        return apart(q, k, v, cq, ck, (mq, mk), None, is_causal)

    monkeypatch.setattr(varlen, "varlen_attn", newer if window else older)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    held = segments.Segments.from_edges((0, 4, 5, 9))
    assert held.cu_queries is held.cu_keys

    def one(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    class Late:
        """The queries of tokens 2 to 8 and all keys."""

        local_slice, query_range = staticmethod(lambda length: slice(0, 9)), staticmethod(lambda length: (2, 9))

        def attend(self, q, k, v, attention, layer):
            return attention(q[:, :, 2:], k, v)

    wanted = segments.attend(held, q, k, v, 0.3, 0.0, one)
    monkeypatch.setattr(segments, "supports_varlen", lambda *of: True)
    assert torch.allclose(segments.attend(held, q, k, v, 0.3, 0.0, one), wanted, atol=1e-6)
    late = segments.Segments.from_edges((0, 4, 5, 9), share=Late())
    assert torch.allclose(segments.attend(late, q, k, v, 0.3, 0.0, one), wanted[:, 2:], atol=1e-6)
    images = segments.attend_images(q, q, q, held.cu_queries, 4, None)
    monkeypatch.setattr(segments, "supports_varlen", lambda *of: False)
    assert torch.allclose(segments.attend_images(q, q, q, held.cu_queries, 4, None), images, atol=1e-6)
