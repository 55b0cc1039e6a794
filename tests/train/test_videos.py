"""A run on clips, images and words, in FP8: counted, evaluated, asked, saved, and what of videos is kept with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from octavo import train
from octavo.cli.main import main
from octavo.config import ConfigError, load_config, load_config_text
from octavo.data import clips_of_digits, digits
from octavo.models import ModelError, tiny
from octavo.train import base

pytest.importorskip("av", reason="rows with videos need the extra `video`")

TEXT = """
model: {{path: {here}/model}}
fp8: {{recipe: blockwise}}
data:
  train: [{{path: {here}/clips/train.json}}, {{path: {here}/digits/train.json}}]
  eval: [{{path: {here}/clips/test.json}}]
  video: {{fps: 4}}
train: {{steps: 2, seq_length: 96, micro_batch: 4, global_batch: 8, lr: 1e-3}}
run: {{dir: {here}/run, threads: 1, health_every: 0, tensorboard: false}}
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("videos")
    tiny.write("qwen3_vl", made / "model", size="mini")
    clips_of_digits.write(made / "clips", 16, 4)
    digits.write(made / "digits", 16, 2)
    return made


@pytest.fixture(scope="module")
def result(here: Path) -> train.RunResult:
    return train.run(load_config_text(TEXT.format(here=here), ()))


def test_clips_train_beside_images_with_a_passing_proof(here, result):
    assert result.status == "finished" and result.eval["questions"] == 4
    proof = json.loads((here / "run" / "proof.json").read_text())
    assert proof["share"] > 0.9 and not proof["missing"] and not proof["pending"]
    assert {"image_encoder", "image_projector", "foundation"} <= set(proof["components"])


def test_what_is_taken_of_videos_is_kept_with_the_run(here, result):
    kept = yaml.safe_load((here / "run" / "config.yaml").read_text())["data"]["video"]
    assert kept["fps"] == 4 and (kept["min_frames"], kept["max_frames"]) == (4, 768)
    assert kept["max_pixels"] == 256 * 64 and kept["cap_pixels_per_frame"] is False
    again = load_config(here / "run" / "config.yaml")
    assert base.with_video(again) == again
    about = json.loads((here / "run" / "environment.json").read_text())
    assert about["video"]["fps"] == 4 and about["video"]["kind"] == "qwen3_vl"
    assert (here / "run" / "hf" / "video_preprocessor_config.json").is_file()


def test_a_run_and_its_folder_are_asked_about_a_clip(here, result, capsys):
    clip = here / "clips" / "videos" / "test" / "00000.mp4"
    for target in ("run", "run/hf"):
        words = ["--video", str(clip), "--prompt", "Which?", "--max-new-tokens", "2", "--json"]
        assert main(["generate", str(here / target), *words]) == 0 and "answer" in json.loads(capsys.readouterr().out)
    for words, found in (
        (["--video", str(clip), "--prompt", "<video> and <video>?"], "2 places for videos"),
        (["--video", str(here / "none.mp4"), "--prompt", "a"], "there is no video"),
        (["--video", str(here / "clips" / "train.json"), "--prompt", "a"], "none of mp4, mov, webm and mkv"),
    ):
        assert main(["generate", str(here / "run/hf"), *words]) != 0
        assert found in capsys.readouterr().err


def test_packs_hold_clips(here):
    text = TEXT.replace("micro_batch: 4, global_batch: 8", "micro_batch: 1, global_batch: 2")
    text = text.replace("video: {{fps: 4}}", "video: {{fps: 4}}\n  packing: true").replace("/run,", "/packed,")
    text = text.replace("seq_length: 96", "seq_length: 256")
    done = train.run(load_config_text(text.format(here=here), ()))
    assert done.status == "finished" and done.eval["questions"] == 4


def test_a_family_without_videos_and_odd_values_are_refused(here, tmp_path):
    cfg = load_config_text(TEXT.format(here=here), [f"model.path={tiny.write('qwen3', tmp_path / 'm', size='mini')}"])
    with pytest.raises(ModelError, match="videos of model_type 'qwen3' are not taken here"):
        base.with_video(cfg)
    with pytest.raises(ConfigError, match="fps"):
        load_config_text(TEXT.format(here=here).replace("fps: 4", "fps: 0"), ())


def test_digits_of_a_clip_are_asked_for_with_video_alone(tmp_path, capsys):
    assert main(["digits", str(tmp_path / "c"), "--frames", "2"]) != 0
    assert "are of videos: add --video" in capsys.readouterr().err
    assert main(["digits", str(tmp_path / "c"), "--video", "--digits", "2", "--train", "2", "--test", "1"]) == 0
    assert "wrote 2 training and 1 test videos" in capsys.readouterr().out
