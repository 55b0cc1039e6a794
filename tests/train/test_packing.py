"""Training on packs: the step of the same samples apart, what a run says and keeps of packs, and going on."""

from __future__ import annotations

import io
import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from octavo import data, models, parallel, train
from octavo.config import Config, load_config, override
from octavo.data import collate, collate_pack
from octavo.fp8 import PlanError
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.forward import evaluation, losses
from octavo.train.forward.forward import Forward
from octavo.train.forward.routing import ExpertLoad
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup import planning
from octavo.train.setup.token_counts import assume_tokens, attention_flops, count_tokens
from tests.train.conftest import at
from tests.train.test_ranks import on_ranks

PACKED = ("data.packing=true", "data.window=16", "train.micro_batch=1", "train.global_batch=2", "train.seq_length=160")
LENGTH = 160


@pytest.fixture
def mixed(make, tmp_path: Path):
    """mixed(...) -> a configuration of packs of images and of talk of all lengths."""
    rows = [
        {"conversations": [{"from": "human", "value": "Say it. " * (1 + n % 4)}, {"from": "gpt", "value": f"{n} " * n}]}
        for n in range(1, 13)
    ]
    (tmp_path / "talk.json").write_text(json.dumps(rows))
    images = make().data.train[0].path

    def build(*overrides: str, dir: str = "run") -> Config:
        both = f"data.train=[{{path: {images}, max_samples: 20}}, {{path: {tmp_path / 'talk.json'}}}]"
        return make(both, *PACKED, *overrides, dir=dir)

    return build


# --- a step ---------------------------------------------------------------------------------------------------------


def samples_per_step(cfg: Config, count: int = 9):
    """(model, its family, samples)."""
    processor = models.load_processor(cfg.model.path)
    loader = data.train_loader(cfg, processor)
    model = models.load(cfg.model.path).train()
    return model, models.describe(model), [loader.encoded[[loader.mixture.row(n)]][0] for n in range(count)]


def trained(model, forward, batches, reduction):
    """(the loss of a step of these micro-batches, its gradients)."""
    packs = [batch["boundaries"].edges if "boundaries" in batch else None for batch in batches]
    total = losses.count([batch["labels"] for batch in batches], reduction, packs)
    model.zero_grad()
    found = 0.0
    for batch, edges in zip(batches, packs, strict=True):
        each = losses.cross_entropy(forward(batch)[:, :-1], losses.targets(batch["labels"]))
        loss = (each * losses.weights(batch["labels"], reduction, total, edges)).sum()
        loss.backward()
        found += float(loss.detach())
    return found, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reduction", ["token", "sample"])
def test_packed_step_equals_step_of_its_samples(mixed, reduction):
    model, family, samples = samples_per_step(mixed())
    apart = [collate([sample], 0) for sample in samples]
    loss, grads = trained(model, Forward(model, World(), None), apart, reduction)
    before = evaluation.evaluate(model, apart)
    forward = Forward(model, World(), None, packed=models.Packed(model, family))
    packs = [collate_pack(samples[:5], 0, 500), collate_pack([], 0, 500), collate_pack(samples[5:], 0, 500)]
    assert any(batch["meta"].has_image for batch in packs) and not all(sample.images for sample in samples)
    ours, own = trained(model, forward, packs, reduction)
    assert ours == pytest.approx(loss, rel=1e-6)
    for name, grad in grads.items():
        assert torch.allclose(own[name], grad, rtol=1e-5, atol=1e-6), name
    assert evaluation.evaluate(model, apart) == before  # held-out rows are padded as ever


def test_sample_has_the_same_weight_in_a_pack():
    labels = torch.tensor([[-100, 1, -100, 4, 5, 6, -100, 7, -100, -100]])
    edges = (0, 2, 6, 8, 10)
    assert losses.count([labels], "sample", [edges]) == 3
    share = losses.weights(labels, "sample", 3.0, edges)
    assert share.tolist() == pytest.approx(np.array([[1, 0, 1 / 3, 1 / 3, 1 / 3, 0, 1, 0, 0]]) / 3, rel=1e-6)
    assert losses.count([labels], "token", [edges]) == 5 and losses.count([labels], "microbatch", [edges]) == 1


def test_routers_and_experts_see_no_padding(place, make, tmp_path):
    from octavo.models.tiny import tiny

    moe = tiny.write("qwen3_moe", tmp_path / "moe", size="mini")
    cfg = make(f"model.path={moe}", f"data.train=[{{path: {talk(tmp_path)}}}]", "data.eval=[]")
    model, family, samples = samples_per_step(cfg, 3)
    forward = Forward(model, World(), None, packed=models.Packed(model, family))
    tokens = sum(len(sample.input_ids) for sample in samples)
    tight, wide = (collate_pack(samples, 0, capacity) for capacity in (tokens, 4096))
    assert wide["boundaries"].length > tokens
    with torch.no_grad():
        assert float(forward.balanced(wide)[1]) == pytest.approx(float(forward.balanced(tight)[1]), rel=1e-6)
        load = ExpertLoad(model)
        for batch in (wide, collate_pack([], 0, 9)):
            load.begin(torch.device("cpu"))
            load.batch(batch, torch.device("cpu"))
            assert forward.balanced(batch)[1].isfinite()
            pairs = sum(float(counts[:-1].sum()) for counts in load._counts)
            layers, each = len(load._counts), model.config.num_experts_per_tok
            assert pairs == layers * each * batch["meta"].tokens


def talk(folder: Path) -> Path:
    file = folder / "few.json"
    rows = [[{"from": "human", "value": "Say it"}, {"from": "gpt", "value": f"{n} " * n}] for n in (3, 9, 5)]
    file.write_text(json.dumps([{"conversations": row} for row in rows]))
    return file


def test_a_pack_needs_a_model_that_was_made_ready(mixed):
    model, _, samples = samples_per_step(mixed(), 1)
    with pytest.raises(TrainError, match=r"not set up for packs \(data\.packing\)"):
        Forward(model, World(), None)(collate_pack(samples, 0, 99))


def test_ranks_with_different_packs_are_detected(mixed, monkeypatch):
    cfg = mixed("train.steps=1", "train.warmup=0", "data.eval=[]")
    own = World.sum

    def with_another(world: World, x: torch.Tensor) -> torch.Tensor:
        return own(world, x) + (torch.arange(5) == 4) if x.numel() == 5 else own(world, x)

    monkeypatch.setattr(World, "sum", with_another)
    with pytest.raises(TrainError, match=r"ranks disagree on the packs of the same rows \(this is rank 0\)"):
        train.run(cfg)


# --- a run ----------------------------------------------------------------------------------------------------------


def test_packed_fp8_run_has_proof_and_padding_and_resumes_exactly(mixed):
    whole = train.run(mixed("train.loss=sample", dir="whole"))
    rows = read_rows(whole.dir / "metrics.jsonl")
    assert all(0 < row["padding"] < 1 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    proof = json.loads((whole.dir / "proof.json").read_text())
    assert not proof["pending"] and not proof["missing"] and whole.eval["questions"] == 16
    # in the midst of a window, and what backward computes again told of its own pack
    cfg = mixed("train.loss=sample", dir="stopped")
    first = train.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    assert first.status == "stopped"
    counters = json.loads((first.dir / "checkpoints/step_3/state.json").read_text())["counters"]
    assert (counters["window"], counters["pack"]) != (0, 0) and counters["rows"] > 6
    second = train.run(override(cfg, ["run.resume=auto", "train.recompute=full", "data.workers=1"]))
    assert second.losses() == whole.losses() and second.eval == whole.eval


def test_a_run_of_epochs_counts_its_packs_says_so_and_goes_on(mixed, monkeypatch):
    cfg = mixed("train.epochs=1.5", "train.warmup=0", "fp8.recipe=off", "run.hf=false", "data.eval=[]")
    console = Console(record=True, width=200, file=io.StringIO())
    first = train.run(cfg, console=console, callbacks=[at(2, signal.SIGTERM)])
    steps = load_config(first.dir / "config.yaml").train.steps
    counted, told = [line for line in console.export_text().splitlines() if line.startswith("train.epochs: ")]
    assert "every row" in counted and f" packs are {steps} steps of 2, " in told
    second = train.run(override(cfg, ["run.resume=auto"]))
    assert (first.steps, second.steps, second.status) == (3, steps, "finished")
    state = json.loads((second.dir / f"checkpoints/step_{steps}/state.json").read_text())
    # 16 of the second epoch's 32 rows are one of its windows; the last step may have a pack more, of the other one
    assert 48 <= state["counters"]["rows"] < 64
    asked: list[dict] = []
    monkeypatch.setattr(parallel, "setup", lambda *given, **axes: asked.append(given[3]()))
    with pytest.raises(AttributeError):  # there is no world
        train.run(override(cfg, ["run.dir=" + str(first.dir.parent / "other")]))
    key = "train.steps (counted from train.epochs: 1.5, with the token counts in data.cache)"
    assert asked[0][key] == str(steps), "ranks that counted others are told apart by it"


@pytest.mark.parametrize(
    "more",
    [
        ("fp8.activations=fp8",),
        ("model.attention=math", "lora={rank: 2}"),
        ("optimizer.update=backward", "train.global_batch=1"),
    ],
)
def test_packs_work_with_memory_savings(mixed, more):
    over = ("train.steps=2", "train.warmup=0", "data.eval=[]")
    result = train.run(mixed(*over, *more))
    assert result.status == "finished" and all(np.isfinite(loss) for loss in result.losses().values())
    if more == ("fp8.activations=fp8",):
        plain = train.run(mixed(*over, dir="plain"))
        assert list(result.losses().values()) == pytest.approx(list(plain.losses().values()), rel=2e-3)


def test_pretraining_packs_documents(make, place, tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(2, 12)))
    over = (f"model.path={place / 'text'}", f"data.train=[{{path: {file}}}]", "data.eval=[]", "train.phase=pretrain")
    cfg = make(*over, *PACKED, "data.join=false", "train.steps=2", "train.warmup=0")
    assert train.run(cfg).status == "finished"
    loader = data.train_loader(cfg, models.load_processor(cfg.model.path))
    [batch, _] = next(loader)
    assert batch["meta"].samples > 1 and sum(batch["meta"].loss_tokens) == batch["meta"].tokens - batch["meta"].samples
    joined = make(*over, *PACKED, "train.seq_length=32")  # samples as long as packs are
    [batch, _] = next(data.train_loader(joined, models.load_processor(cfg.model.path)))
    assert batch["boundaries"].edges == (0, 32)


def test_a_plan_counts_packs(mixed):
    cfg = mixed("train.seq_length=512")
    model, family = planning.meta_model(cfg)
    processor = models.load_processor(cfg.model.path)
    found = count_tokens(cfg, processor, family, model.config)
    assert found.rows == 1 and found.row % 16 == 0 and 0 < found.sample < found.row
    whole = attention_flops(model.config, replace(found, sample=0))
    assert attention_flops(model.config, found) < whole
    longest, told = assume_tokens(cfg, family.components, model.config)
    assert longest.row == 512 and longest.rows == 1 and "a pack of train.seq_length 512 tokens" in told
    assert longest.counts["image_encoder"] % longest.image == 0 and longest.counts["image_projector"] < 512
    _, _, notes = planning.plan_model(cfg, model, family)
    assert any("rows are packs of up to 512 tokens" in note for note in notes)


def test_a_model_whose_samples_would_mix_is_refused_before_a_weight_is_read(mixed, tmp_path, place):
    raw = json.loads((place / "text/config.json").read_text())
    raw |= {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    folder = tmp_path / "windows"
    folder.mkdir()
    for file in (place / "text").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(PlanError, match=r"data\.packing: true is not possible: .* layers of type sliding_attention"):
        train.run(mixed(f"model.path={folder}", f"data.train=[{{path: {talk(tmp_path)}}}]", "data.eval=[]"))


def test_packs_of_a_thousand_rows_waste_little():
    """On synthetic lengths, as benchmarks/packing.py has them."""
    from benchmarks.packing import lengths, share

    assert share(lengths("mixed", 4000), 8192, 1000) < 0.01 < share(lengths("mixed", 4000), 8192, 64)


@pytest.mark.long
def test_two_ranks_train_on_packs_as_one_and_one_goes_on(mixed):
    over = ("fp8.recipe=off", "run.save_every=3", "run.keep=9", "train.global_batch=4", "train.epochs=2")
    one, two = mixed(*over, dir="one"), mixed(*over, dir="two")
    alone = list(train.run(one).losses().values())
    on_ranks(two)
    rows = read_rows(Path(two.run.dir) / "metrics.jsonl")
    assert [row["loss"] for row in rows] == pytest.approx(alone, rel=1e-5)
    shares = [row["padding"] for row in read_rows(Path(one.run.dir) / "metrics.jsonl")]
    assert [row["padding"] for row in rows] == pytest.approx(shares)
    checkpoint = Path(two.run.dir) / "checkpoints" / "step_3"
    resumed = train.run(mixed(*over, f"run.resume={checkpoint}", dir="after"))
    assert list(resumed.losses().values()) == pytest.approx(alone[3:], rel=1e-4)
