"""A run on clips, images and words, in FP8: counted, evaluated, asked, saved, and what of videos is kept with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image

from octavo import data, models, rl, train
from octavo.cli.main import main
from octavo.config import ConfigError, load_config, load_config_text
from octavo.data.builtin import digit_clips, digits
from octavo.data.tasks.pairs import collate_pairs, parse_pair
from octavo.models import ModelError
from octavo.models.tiny import tiny
from octavo.rl.phases import reference_cache
from octavo.train.estimate.memory import MemoryEstimator
from octavo.train.setup import planning, token_counts
from octavo.train.setup.resolve_config import resolve_video

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
    digit_clips.write(made / "clips", 16, 4)
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
    assert resolve_video(again) == again
    about = json.loads((here / "run" / "environment.json").read_text())
    assert about["video"]["fps"] == 4 and about["video"]["kind"] == "qwen3_vl"
    assert (here / "run" / "hf" / "video_preprocessor_config.json").is_file()


def test_a_run_and_its_folder_are_asked_about_a_clip(here, result, capsys):
    clip = here / "clips" / "videos" / "test" / "00000.mp4"
    for target in ("run", "run/hf"):
        words = ["--video", str(clip), "--prompt", "Which?", "--max-new-tokens", "2", "--json"]
        assert main(["generate", str(here / target), *words]) == 0 and "answer" in json.loads(capsys.readouterr().out)
    for words, found in (
        (
            ["--video", str(clip), "--prompt", "<video> and <video>?"],
            "has 2 placeholders <video> for 1 video",
        ),
        (["--video", str(here / "none.mp4"), "--prompt", "a"], "there is no video"),
        (["--video", str(here / "clips" / "train.json"), "--prompt", "a"], "not mp4, mov, webm or mkv"),
    ):
        assert main(["generate", str(here / "run/hf"), *words]) != 0
        assert found in capsys.readouterr().err


def test_a_folder_of_frames_is_asked_about_by_its_rate(here, result, capsys):
    frames = here / "frames"
    frames.mkdir()
    for number in range(6):
        Image.new("RGB", (16, 16), (40 * number,) * 3).save(frames / f"{number}.png")
    asked = ["generate", str(here / "run/hf"), "--prompt", "Which?", "--max-new-tokens", "2", "--json", "--video"]
    said = []
    for fps in ("2", "0.5"):  # 3 and 12 seconds, as the model is told in front of each pair of frames
        assert main([*asked, str(frames), "--fps", fps]) == 0
        said.append(data.decode_videos([str(frames)], models.load_processor(here / "model"), fps=float(fps))[0])
    assert [shot.fps for shot in said] == [2, 0.5] and "answer" in capsys.readouterr().out
    clip = str(here / "clips" / "videos" / "test" / "00000.mp4")
    for words, found in (
        ([str(frames)], "is a folder of frames without a known rate; add --fps"),
        ([clip, "--fps", "2"], "--fps is the rate of a folder of frames, and "),
        *(
            ([str(frames), "--fps", value], "a number above 0 and at most 1000, found")
            for value in ("0", "nan", "x", "1e4")
        ),
    ):
        assert _status([*asked, *words]) != 0
        assert found in capsys.readouterr().err


def _status(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as end:  # argparse's
        return int(end.code or 0)


def test_held_out_clips_are_answered_and_counted(here, result, capsys):
    assert main(["eval", str(here / "run"), "--answers", "3", "--max-new-tokens", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["completions"] == 3 and found["questions"] == 4 and "rewards/exact_match/mean" in found


def test_pairs_and_prompts_hold_clips(here):
    """Preferences by a reference that is asked once; and prompts, whose completions the trainer gives the probability
    that the engine gave them."""
    rows = json.loads((here / "clips" / "train.json").read_text())
    pairs = [
        {"prompt": asked["value"], "chosen": answer["value"], "rejected": "0", "video": row["video"]}
        for row in rows
        for asked, answer in [row["conversations"]]
    ]
    (here / "clips" / "pairs.json").write_text(json.dumps(pairs))
    of = TEXT.replace("/clips/train.json", "/clips/pairs.json").replace(", {{path: {here}/digits/train.json}}", "")
    of = of.replace("train: {{steps: 2", "preference: {{reference: disk}}\ntrain: {{phase: preference, steps: 1")
    done = rl.run(load_config_text(of.replace("/run,", "/preferred,").format(here=here), ()))
    assert done.status == "finished" and done.eval["questions"] == 4
    asked = "rl: {{rewards: [exact_match], prompts: 4, group: 2, max_new_tokens: 4}}\ntrain: {{phase: rl, steps: 1"
    of = TEXT.replace("train: {{steps: 2", asked).replace("micro_batch: 4, global_batch: 8", "micro_batch: 2")
    done = rl.run(load_config_text(of.replace("/run,", "/rewarded,").format(here=here), ()))
    row = json.loads((here / "rewarded" / "metrics.jsonl").read_text().splitlines()[0])
    assert done.status == "finished" and 0 <= row["logp_gap_max"] < 1e-5
    assert not json.loads((here / "rewarded" / "proof.json").read_text())["missing"]


def test_a_kept_reference_belongs_to_the_pixels_of_a_clip(here):
    encoder = data.PairEncoder(models.load_processor(here / "model"), 128)
    row, where = {"prompt": "<video>a", "chosen": "b", "rejected": "c"}, here / "clips" / "videos" / "test"
    of = ({**row, "video": f"{n:05d}.mp4"} for n in (0, 1))
    pair, other = (encoder.encode(parse_pair(one, "", file="x", row=0, images=where)) for one in of)
    assert (pair.chosen.input_ids == other.chosen.input_ids).all()
    marks = [
        [mark for *_, mark in reference_cache._iter_answers(collate_pairs([one, one], 0))]
        for one in (pair, pair, other)
    ]
    assert marks[0] == marks[1] and len(marks[0]) == 4 and not {*marks[0]} & {*marks[2]}


def test_rows_that_are_left_out_count_for_no_prediction(here):
    """Seven of eight clips are too long: what is predicted is that of the eighth, which alone is trained on."""
    rows = json.loads((here / "clips" / "train.json").read_text())
    long = [
        {**row, "conversations": [row["conversations"][0], {"from": "gpt", "value": "0 " * 99}]} for row in rows[2:]
    ]
    found = []
    for name, some in (("fit", rows[:2]), ("all", rows[:2] + long)):
        (here / "clips" / f"{name}.json").write_text(json.dumps(some))
        cfg = load_config_text(TEXT.format(here=here), [f"data.train=[{{path: {here}/clips/{name}.json}}]"])
        model, family = planning.meta_model(cfg)
        counted = token_counts.count_tokens(
            resolve_video(cfg), models.load_processor(here / "model"), family, model.config
        )
        plan, _, _ = planning.plan_model(cfg, model, family)
        found.append((counted, MemoryEstimator(cfg, model, family, plan, counted, device="cpu").estimate(cfg).total))
    assert found[0] == found[1] and found[0][0].rows == 4 and found[0][0].counts["image_encoder"] > 0


def test_packs_hold_clips(here):
    text = TEXT.replace("micro_batch: 4, global_batch: 8", "micro_batch: 1, global_batch: 2")
    text = text.replace("video: {{fps: 4}}", "video: {{fps: 4}}\n  packing: true").replace("/run,", "/packed,")
    text = text.replace("seq_length: 96", "seq_length: 256")
    done = train.run(load_config_text(text.format(here=here), ()))
    assert done.status == "finished" and done.eval["questions"] == 4


def test_a_family_without_videos_and_odd_values_are_refused(here, tmp_path):
    cfg = load_config_text(TEXT.format(here=here), [f"model.path={tiny.write('qwen3', tmp_path / 'm', size='mini')}"])
    with pytest.raises(ModelError, match="Octavo does not support videos for model_type 'qwen3'"):
        resolve_video(cfg)
    with pytest.raises(ConfigError, match="fps"):
        load_config_text(TEXT.format(here=here).replace("fps: 4", "fps: 0"), ())


def test_digits_of_a_clip_are_asked_for_with_video_alone(tmp_path, capsys):
    assert main(["digits", str(tmp_path / "c"), "--frames", "2"]) != 0
    assert "apply to videos: add --video" in capsys.readouterr().err
    assert main(["digits", str(tmp_path / "c"), "--video", "--digits", "2", "--train", "2", "--test", "1"]) == 0
    assert "wrote 2 training and 1 test videos" in capsys.readouterr().out
