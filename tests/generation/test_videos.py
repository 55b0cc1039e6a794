"""Prompts with videos: greedy answers of the engine equal those of transformers, whose model takes videos itself."""

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
def test_answers_about_a_video_match_transformers(tmp_path, kind):
    folder = tiny.write(kind, tmp_path / kind, size="mini", seed=3)
    model, processor = models.load(folder, dtype=torch.float32), models.load_processor(folder)
    frames = np.random.RandomState(0).randint(0, 256, (5, 16, 24, 3), np.uint8)[
        :, :, : 16 if kind == "internvl" else 24
    ]
    shot = DecodedVideo(20, 8.0, (0, 5, 10, 14, 19), frames.shape[1:3], frames)
    words = {"type": "text", "text": "what?"}
    with_video = [{"role": "user", "content": [{"type": "video"}, words]}], [], [shot]
    plain = [{"role": "user", "content": [words]}], []
    logged: list[str] = []
    answers = generation.answers(model, processor, [with_video, plain], Sampling(6, temperature=0), log=logged.append)
    assert answers[0] == [models.generate(model, processor, with_video[0], (), 6, [shot])]
    assert answers[1] == [models.generate(model, processor, plain[0], (), 6)]
    assert bool(logged) == (kind == "qwen2_5_vl")
    with pytest.raises(ModelError, match="have 1 video part for 0 videos"):
        models.encode_conversation(processor, with_video[0])
