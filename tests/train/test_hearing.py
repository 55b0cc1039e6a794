"""A family that hears learns the pitch of tones in FP8, and stock transformers reads what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMultimodalLM

from octavo import fp8, models, train
from octavo.models import tiny

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

    def end(self, run: train.Run, result: train.Result) -> None:
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
