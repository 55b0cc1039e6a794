"""A family that hears learns the pitch of tones in FP8, and stock transformers reads what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMultimodalLM

from octavo import fp8, models, train
from octavo.cli.main import main
from octavo.data import BadSample
from octavo.models.tiny import tiny
from octavo.train.estimate.memory import states
from octavo.train.estimate.memory.footprint import MemoryEstimator, with_settings
from octavo.train.estimate.memory.switches import savings
from octavo.train.setup import planning, token_counts
from octavo.train.setup.checks import check_family
from octavo.train.step import cuda_graphs
from tests.train.memory.test_predicted import ONE, agree, counted, predicted

from .conftest import Make

pytest.importorskip("soundfile", reason="rows with sound need the extra `audio`")
STEPS = 20


def tone(file: Path, pitch: float, seconds: float = 0.4, rate: int = 16000) -> Path:
    import soundfile

    soundfile.write(file, 0.4 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate), rate)
    return file


@pytest.fixture
def tones(tmp_path: Path) -> Path:
    """Rows about tones, high and low, of several lengths, and every third about none."""
    rows = []
    for number in range(24):
        high, name = bool(number % 2), f"{number}.{'flac' if number % 4 else 'wav'}"
        question, more = "Hello?", {}
        if number % 3:
            tone(tmp_path / name, (300, 2400)[high] + 20 * number, 0.2 + 0.03 * number)
            question, more = "<audio>High or low?", {"audio": name}
        answer = ("high" if high else "low") if more else "hello"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns, **more})
    (tmp_path / "tones.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "tones.jsonl"


@pytest.fixture
def hears(make: Make, tones: Path, tmp_path: Path):
    """hears(*overrides) -> a configuration over the tones."""
    tiny.write("qwen2_audio", tmp_path / "tiny", size="mini")
    given = (f"model.path={tmp_path / 'tiny'}", f'data.train=[{{path: "{tones}", format: messages}}]', "data.eval=[]")
    return lambda *more, dir="run": make(*given, *more, dir=dir)


class Logits(train.Callback):
    """What the trained model makes of a question about a sound, in high precision."""

    def end(self, run: train.Run, result: train.RunResult) -> None:
        processor = models.load_processor(run.cfg.model.path)
        sound = np.sin(np.arange(5000) / 3).astype(np.float32)
        text = [f"a {processor.audio_token} b", "c"]
        self.inputs = processor(text=text, audio=[sound], return_tensors="pt", padding=True)
        run.model.eval()
        with fp8.high_precision(run.model), torch.no_grad():
            self.found = run.model(**self.inputs).logits


@pytest.mark.long
def test_it_trains_and_stock_transformers_gives_its_logits(hears):
    seen = Logits()
    cfg = hears(f"train.steps={STEPS}", "train.micro_batch=1", "run.hf=true")
    result = train.run(cfg, callbacks=[seen])
    losses = list(result.losses().values())
    assert len(losses) == STEPS and sum(losses[-5:]) < 0.7 * sum(losses[:5])
    proof = json.loads((result.dir / "proof.json").read_text())
    assert proof["share"] > 0.99 and not proof["missing"] and not proof["pending"]
    assert {"audio_encoder", "audio_projector", "foundation"} <= set(proof["components"])
    stock = AutoModelForMultimodalLM.from_pretrained(result.dir / "hf").eval()
    with torch.no_grad():
        assert torch.equal(stock(**seen.inputs).logits, seen.found)


def test_what_is_not_for_models_that_hear(hears, tmp_path, capsys):
    """Refused by name, before a step."""
    with pytest.raises(fp8.PlanError, match="takes audio, which packs do not support"):
        train.run(hears("data.packing=true", "train.micro_batch=1", dir="packed"))
    cfg = hears(dir="pairs")
    phase = cfg.model_copy(update={"train": cfg.train.model_copy(update={"phase": "preference"})})
    with pytest.raises(train.TrainError, match="preference does not support audio models"):
        check_family(phase)
    file, found = tmp_path / "tiny/config.json", json.loads((tmp_path / "tiny/config.json").read_text())
    file.write_text(json.dumps(found | {"audio_config": found["audio_config"] | {"encoder_layerdrop": 0.1}}))
    with pytest.raises(train.TrainError, match="encoder_layerdrop of audio_config is 0.1, .*Set it to 0"):
        check_family(cfg)
    file.write_text(json.dumps(found))
    model = models.load(tmp_path / "tiny")
    assert "takes audio, which prompts do not support" in models.why_not_paged(model)
    assert "takes audio" in cuda_graphs.unsupported_model_reason(model, models.describe(model), 0.0)
    assert main(["generate", str(tmp_path / "tiny"), "--prompt", "<audio>High or low?"]) == 2
    assert "has a placeholder for audio (<audio>), and this command does not take audio" in capsys.readouterr().err
    tone(tmp_path / "1.flac", 400, 2.0)
    with pytest.raises(BadSample, match="1.flac is too long: 2.00 s"):
        train.run(hears(dir="long"))


def test_the_plan_counts_sounds(hears):
    """Tokens of the data, of what is assumed and of what is asked for; a frozen tower has no wgrad; memory and FLOPs
    grow with sounds."""
    cfg = hears("model.freeze=[audio_encoder]", "train.micro_batch=2", "train.seq_length=128")
    plan, family, _ = planning.plan_for(cfg)
    frozen = {row.row.frozen for row in plan.rows if row.component == "audio_encoder"}
    assert frozen == {True} and {row.row.frozen for row in plan.rows if row.component == "audio_projector"} == {False}
    config = models.read_config(cfg.model.path)
    assumed, words = token_counts.assume_tokens(cfg, family.components, config)
    assert assumed.counts["audio_encoder"] == 2 * 50 and assumed.counts["audio_projector"] == 2 * 25
    assert assumed.sound == 50 and "in each a sound of the longest" in words
    counted = token_counts.count_tokens(cfg, models.load_processor(cfg.model.path), family, config)
    assert 50 < counted.counts["audio_encoder"] <= 112 and counted.sound == 50
    asked = token_counts.complete_tokens(cfg, family, {"foundation": 256, "audio_encoder": 100})
    assert asked.counts["audio_projector"] == 50 and asked.sound == 50
    six_sounds = token_counts.complete_tokens(cfg, family, {"foundation": 256, "audio_encoder": 600})
    assert six_sounds.sound == 50
    narrow = cfg.model_copy(update={"train": cfg.train.model_copy(update={"seq_length": 16})})  # short ones fit
    assert token_counts.assume_tokens(narrow, family.components, config)[0].counts["audio_encoder"] == 2 * 50
    silent = token_counts.complete_tokens(cfg, family, {"foundation": 256, "audio_encoder": 0})
    assert token_counts.attention_flops(config, asked) > token_counts.attention_flops(config, silent)
    sizes = MemoryEstimator(cfg, planning.meta_model(cfg)[0], family, plan, assumed, device="cpu")
    full = sizes.estimate(with_settings(cfg, {"train.logits": "full"})).kinds  # chunked is not possible here
    assert sizes.estimate(cfg).kinds == full and "train.logits" not in {one.key for one in savings(sizes)}
    reached = states.reached_by_backward(models.empty(cfg.model.path))  # whose first projection is k
    assert {f"model.audio_tower.layers.0.self_attn.{name}_proj" for name in "qkv"} <= reached


@pytest.mark.long
def test_a_run_counts_the_memory_that_was_predicted(hears):
    """Rows with several short sounds, each of which the tower takes for the longest."""
    cfg = hears(*ONE, "fp8.recipe=rowwise")
    train.run(cfg)
    agree(counted(cfg), predicted(cfg))
