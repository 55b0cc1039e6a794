"""The engine with models of runs: adapters on FP8 codes, and parameters sharded over ranks."""

from __future__ import annotations

import numpy as np
import torch

from octavo import fp8, models, parallel
from octavo.fp8.observe import uncounted
from octavo.fp8.weights import frozen_bytes
from octavo.generation import Context, Engine, Sampling
from octavo.models.forward.unused_towers import attach_dummy_image
from octavo.models.tiny import tiny
from tests import ranks
from tests.generation.conftest import make_prompts


def test_adapters_on_fp8_codes_generate_without_a_copy(load_mini):
    from octavo import adapters
    from octavo.config import LoraSection

    source, processor = load_mini("qwen3_vl")
    model = models.load(source.name_or_path, load_in_fp8="row")
    family = models.describe(model)
    models.freeze_all(model)
    fp8.apply(model, fp8.plan(model, "rowwise"))
    adapters.attach(model, family, LoraSection(rank=4), seed=1)
    prompts, sampling = make_prompts(model, processor, 4), Sampling(6, temperature=1.0)
    before, codes = fp8.fingerprint(model), frozen_bytes(model)
    engine = Engine(model, processor.tokenizer, slots=8)
    plain = engine.generate(prompts, sampling, group=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    with_adapters = engine.generate(prompts, sampling, group=2)
    assert (
        max(np.abs(a.logps[0] - b.logps[0]) for a, b in zip(plain, with_adapters, strict=True)) > 0.1
    )  # cached keys are not reused
    assert (fp8.fingerprint(model), frozen_bytes(model)) == (before, codes)


def _rank(world, folder: str) -> list:
    model, processor = models.load(folder), models.load_processor(folder)
    prompts = make_prompts(model, processor, 3)
    sampling = Sampling(4, temperature=1.0, seed=5)
    single = Engine(model, processor.tokenizer, slots=4).generate(prompts, sampling, group=2)
    family = models.describe(model)
    needs_dummy: list[bool] = []
    parallel.shard(model, family, world)
    attach_dummy_image(model, family, enabled=lambda: needs_dummy[-1], guard=uncounted)
    # Uneven numbers of prompts, so that one rank waits for the other.
    local_prompts = prompts[:2] if world.rank else prompts[2:]
    engine = Engine(model, processor.tokenizer, Context(world=world, dummy_image=needs_dummy.append), slots=4)
    completions = engine.generate(local_prompts, sampling, group=2)
    uneven = engine.generate([] if world.rank else local_prompts[:1], sampling)
    return [
        [c.tokens.tolist() for c in single], [c.tokens.tolist() for c in completions],
        [float(c.logps.sum()) for c in single],
        [float(c.logps.sum()) for c in completions], len(uneven), any(needs_dummy), all(needs_dummy),
    ]  # fmt: skip


def test_two_ranks_match_one(tmp_path):
    folder = tiny.write("qwen3_vl", tmp_path / "model", size="mini")
    (expected, rank_0, sums, sums_0, first, *dummy_0), (_, rank_1, _, sums_1, second, *dummy_1) = ranks.run(
        _rank, 2, str(folder)
    )
    assert rank_1 + rank_0 == expected and np.allclose(sums_1 + sums_0, sums, atol=1e-4)
    assert (first, second) == (1, 0)
    assert dummy_0 == [False, False] and dummy_1 == [True, False]  # only while rank 0 has an image
