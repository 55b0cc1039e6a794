"""Questions about videos: the engine's greedy answers are those of transformers, whose model takes videos itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo import generation, models
from octavo.data.encoding.video import DecodedVideo
from octavo.generation import Sampling
from octavo.models import ModelError
from octavo.models.tiny import tiny


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "internvl"])
def test_answers_about_a_video_are_those_of_transformers(tmp_path, kind):
    folder = tiny.write(kind, tmp_path / kind, size="mini", seed=3)
    model, processor = models.load(folder, dtype=torch.float32), models.load_processor(folder)
    frames = np.random.RandomState(0).randint(0, 256, (5, 16, 24, 3), np.uint8)[
        :, :, : 16 if kind == "internvl" else 24
    ]
    shot = DecodedVideo(20, 8.0, (0, 5, 10, 14, 19), frames.shape[1:3], frames)
    words = {"type": "text", "text": "what?"}
    asked = [{"role": "user", "content": [{"type": "video"}, words]}], [], [shot]
    plain = [{"role": "user", "content": [words]}], []
    said: list[str] = []
    found = generation.answers(model, processor, [asked, plain], Sampling(6, temperature=0), log=said.append)
    assert found[0] == [models.generate(model, processor, asked[0], (), 6, [shot])]
    assert found[1] == [models.generate(model, processor, plain[0], (), 6)]
    assert bool(said) == (kind == "qwen2_5_vl")
    with pytest.raises(ModelError, match="hold 1 video parts but 0 videos were given"):
        models.encode_conversation(processor, asked[0])
