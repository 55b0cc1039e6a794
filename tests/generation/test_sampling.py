"""Filters, frequencies of sampled tokens, and dependencies of random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from octavo.generation import GenerationError, Prompt, Sampling
from octavo.generation.sampling import choose, filter_probabilities, uniforms


@pytest.mark.parametrize("top_k", [0, 1, 7, 400])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 1.0])
def test_filters_match_transformers(top_k, top_p, min_p):
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 5] = -torch.inf
    expected = logits
    for warper in (
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
        *([MinPLogitsWarper(min_p)] if min_p else []),
    ):
        expected = warper(None, expected)
    kept = filter_probabilities(logits.softmax(-1), Sampling(1, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(kept > 0, expected > -torch.inf)


def test_token_frequencies_match_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0, -torch.inf, -1.0]])
    count = 40_000
    u = uniforms(Sampling(count, seed=11), [5], [0])[0]
    assert u.min() >= 0 and u.max() < 1
    tokens, logps, entropies = choose(logits.expand(count, -1), Sampling(1, temperature=2.0), u)
    p = (logits[0].double() / 2).softmax(-1)
    share = torch.bincount(tokens, minlength=5) / count
    assert (share - p).abs().max() < 5 * (0.25 / count) ** 0.5
    assert torch.allclose(logps.double(), p.log()[tokens], atol=1e-6)
    assert abs(entropies[0] - torch.special.entr(p).sum()) < 1e-6


def test_edges_of_the_distribution():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    largest = 1 - 2.0**-48
    u = torch.tensor([0.0, 0.5 - 2.0**-48, 0.5, largest], dtype=torch.float64)
    tokens, logps, _ = choose(logits.expand(4, -1), Sampling(1), u)
    assert tokens.tolist() == [1, 1, 2, 2] and torch.allclose(logps, torch.tensor(0.5).log())
    greedy, logps, entropy = choose(logits[:, :3] * 3, Sampling(1, temperature=0), u[:1])
    assert greedy.tolist() == [1] and torch.allclose(logps.exp(), torch.tensor([0.5]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 2, 2, 3]),
        ({"temperature": 1e-3}, [1, 1, 1, 2, 2]),
        ({"top_k": 2}, [1, 1, 1, 2, 2]),
        ({"top_p": 0.8}, [1, 1, 1, 2, 2]),
        ({"min_p": 0.5}, [1, 1, 1, 2, 2]),
        ({"temperature": 0.0}, [1, 1, 1, 1, 1]),
    ],
)
def test_excluded_tokens_do_not_change_the_shares_of_others(options, expected):
    """Also if excluded tokens have all the probability in fp32, as image placeholders may, or have no logit (NVILA)."""
    logits = torch.tensor([[9.0, 1.0, 1.0, 0.0, 9.0]])
    u = torch.tensor([0.0, 0.3, 0.49, 0.51, 0.9], dtype=torch.float64)
    tokens, logps, _ = choose(logits.expand(5, -1), Sampling(1, excluded=(0, 4, 5, 700), **options), u)
    assert tokens.tolist() == expected
    exact = (logits[0].double() / (options.get("temperature") or 1.0)).log_softmax(0)
    assert torch.allclose(logps.double(), exact[tokens])  # over all tokens


def test_large_batches_are_sampled_in_parts(monkeypatch):
    logits, u = torch.randn(9, 40), torch.rand(9, dtype=torch.float64)
    single = choose(logits, Sampling(1, top_p=0.8), u)
    monkeypatch.setattr("octavo.generation.sampling._MAX_LOGITS", 100)
    assert all(torch.equal(a, b) for a, b in zip(single, choose(logits, Sampling(1, top_p=0.8), u), strict=True))


def test_random_numbers_depend_on_seed_step_prompt_sample_and_position():
    base = uniforms(Sampling(6, seed=1, step=2), [3, 9], [0, 1])
    assert base.dtype == torch.float64 and base.shape == (2, 6)
    assert torch.equal(base[1], uniforms(Sampling(6, seed=1, step=2), [9], [1])[0])
    assert torch.equal(base[:, :4], uniforms(Sampling(4, seed=1, step=2), [3, 9], [0, 1]))
    others = [
        uniforms(Sampling(6, seed=seed, step=step), [prompt], [sample])[0]
        for seed, step, prompt, sample in ((2, 2, 3, 0), (1, 3, 3, 0), (1, 2, 4, 0), (1, 2, 3, 1), (1 + 2**32, 2, 3, 0))
    ]
    streams = torch.cat([base[0], *others])
    assert len(streams.unique()) == len(streams)


def test_generator_matches_published_philox():
    """Known answers of Philox4x32-10 (kat_vectors of Random123), as words of counter and key."""
    from octavo.fp8.arithmetic import random_blocks

    full = 0xFFFFFFFF
    for counter, seed, words in (
        ((0,) * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((full,) * 4, full << 32 | full, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0 << 32 | 0xA4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        assert tuple(int(x) for x in random_blocks([torch.tensor([c]) for c in counter], seed)) == words


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: Sampling(0), "max_new_tokens=0"),
        (lambda: Sampling(1, temperature=-1.0), "temperature=-1.0"),
        (lambda: Sampling(1, temperature=float("nan")), "temperature=nan"),
        (lambda: Sampling(1, temperature=1e-39), r"temperature=1e-39 \(0, or at least 1e-6\)"),  # logits overflow
        (lambda: Sampling(1, top_p=0.0, min_p=2.0), r"top_p=0.0 .*, min_p=2.0"),
        (lambda: Sampling(1, top_k=-1), "top_k=-1"),
        (lambda: Sampling(1, stop="x"), "stop='x'"),
        (lambda: Sampling(1, stop=("",)), "stop="),
        (lambda: Sampling(1, seed=-1, step=2**32), "seed=-1 .* step=4294967296"),
        (lambda: Prompt(np.zeros(0, dtype=np.int64)), r"shape \(0,\)"),
        (lambda: Prompt(np.zeros(1, dtype=np.int64), number=-1), "number of a prompt is -1"),
        (lambda: Prompt(np.zeros(1, dtype=np.int64), images=1), "has images=1, but no pixels"),
    ],
)
def test_values_out_of_range_are_rejected(what, message):
    with pytest.raises(GenerationError, match=message):
        what()
