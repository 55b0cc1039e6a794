"""The engine with models as runs make them: adapters over FP8 codes, and parameters shared by ranks."""

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
from tests.generation.conftest import prompts_of


def test_adapters_over_fp8_codes_generate_without_a_copy(made):
    from octavo import adapters
    from octavo.config import LoraSection

    source, processor = made("qwen3_vl")
    model = models.load(source.name_or_path, load_in_fp8="row")
    family = models.describe(model)
    models.freeze_all(model)
    fp8.apply(model, fp8.plan(model, "rowwise"))
    adapters.attach(model, family, LoraSection(rank=4), seed=1)
    prompts, sampling = prompts_of(model, processor, 4), Sampling(6, temperature=1.0)
    before, codes = fp8.fingerprint(model), frozen_bytes(model)
    engine = Engine(model, processor.tokenizer, slots=8)
    plain = engine.generate(prompts, sampling, group=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    worn = engine.generate(prompts, sampling, group=2)
    assert max(np.abs(a.logps[0] - b.logps[0]) for a, b in zip(plain, worn, strict=True)) > 0.1  # no old keys are used
    assert (fp8.fingerprint(model), frozen_bytes(model)) == (before, codes)


def _rank(world, folder: str) -> list:
    model, processor = models.load(folder), models.load_processor(folder)
    prompts = prompts_of(model, processor, 3)
    sampling = Sampling(4, temperature=1.0, seed=5)
    alone = Engine(model, processor.tokenizer, slots=4).generate(prompts, sampling, group=2)
    family = models.describe(model)
    wanted: list[bool] = []
    parallel.shard(model, family, world)
    attach_dummy_image(model, family, enabled=lambda: wanted[-1], guard=uncounted)
    mine = prompts[:2] if world.rank else prompts[2:]  # other counts, so that one rank waits for the other
    engine = Engine(model, processor.tokenizer, Context(world=world, dummy_image=wanted.append), slots=4)
    got = engine.generate(mine, sampling, group=2)
    nobody = engine.generate([] if world.rank else mine[:1], sampling)
    return [
        [c.tokens.tolist() for c in alone], [c.tokens.tolist() for c in got], [float(c.logps.sum()) for c in alone],
        [float(c.logps.sum()) for c in got], len(nobody), any(wanted), all(wanted),
    ]  # fmt: skip


def test_two_ranks_generate_what_one_does(tmp_path):
    folder = tiny.write("qwen3_vl", tmp_path / "model", size="mini")
    (alone, one, sums, of_one, first, *dummy), (_, two, _, of_two, second, *other) = ranks.run(_rank, 2, str(folder))
    assert two + one == alone and np.allclose(of_two + of_one, sums, atol=1e-4)
    assert (first, second) == (1, 0)
    assert dummy == [False, False] and other == [True, False]  # only in the step in which the other one had an image
