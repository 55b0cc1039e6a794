"""Sealed runs have the losses of plain runs, their weights can be unsealed, and no plain data is left."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import traceback
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from octavo import adapters, data, models, rl, sealing, train
from octavo.base import encryption
from octavo.base.encryption.key import write_new
from octavo.cli.main import main
from octavo.config import ConfigError, load_config_text, override
from octavo.data.builtin import digit_clips, digits
from octavo.data.tasks.sealed import SealedRows
from octavo.models.tiny import tiny
from tests.sealing.conftest import SECRET
from tests.sealing.test_adapter import attached

PLANTED = ("the orchid is planted at midnight", "copper lantern nine")
STEPS = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`text/` and `see/` with models, rows and their sealed twins, made by the command line."""
    folder = tmp_path_factory.mktemp("sealed")
    (folder / "seal.key").write_bytes(SECRET)
    (folder / "seal.key").chmod(0o600)
    answers = [f"{PLANTED[n % 2]} {n}" for n in range(24)]
    turns = [[{"role": "user", "content": f"{PLANTED[1]}?"}, {"role": "assistant", "content": a}] for a in answers]
    rows = [{"id": f"orchid-{n}", "messages": t} for n, t in enumerate(turns)]
    rows.insert(5, {"messages": [{"role": "user", "content": "copper " * 300}, turns[0][1]]})  # is left out: too long
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny.write("qwen3_moe", folder / "text", size="mini")
    tiny.write("qwen3_vl", folder / "see", size="mini")
    digits.write(folder / "digits", train=24, test=4)
    for model, source in (("text", "text.jsonl"), ("see", "digits/train.json")):
        key = ["--key-file", str(folder / "seal.key")]
        assert main(["seal", "model", str(folder / model), str(folder / f"{model}-twin"), *key]) == 0
        made = ["seal", "data", str(folder / source), str(folder / f"{model}-rows"), "train.seq_length=192"]
        made += ["data.train_on_prompt=true"] if model == "see" else []
        assert main([*made, "--model", str(folder / model), *key]) == 0
    return folder


def configured(place: Path, model: str, sealed: bool, dir: Path, *more: str):
    rows = place / (f"{model}-rows" if sealed else "text.jsonl" if model == "text" else "digits/train.json")
    folder = place / (f"{model}-twin" if sealed else model)
    prompt = "true" if model == "see" and not sealed else "false"
    text = f"""
model: {{path: {folder}}}
fp8: {{recipe: off}}
data: {{train: [{{path: {rows}}}], sealed: {str(sealed).lower()}, train_on_prompt: {prompt}}}
train: {{steps: {STEPS}, seq_length: 192, micro_batch: 2, global_batch: 4, lr: 2e-5}}
run: {{dir: {dir}, health_every: 0, tensorboard: false, threads: 1, save_every: 0}}
"""
    return load_config_text(text, more)


def pair(place: Path, tmp_path: Path, model: str, *more: str) -> list[train.RunResult]:
    return [train.run(configured(place, model, sealed, tmp_path / f"s{sealed:d}", *more)) for sealed in (False, True)]


def apart(runs: list[train.RunResult]) -> float:
    """The largest relative difference of their losses."""
    plain, sealed = (list(run.losses().values()) for run in runs)
    assert len(plain) == len(sealed) == STEPS and len(set(plain)) == STEPS
    return max(abs(a - b) / a for a, b in zip(plain, sealed, strict=True))


def nothing_plain(text: bytes) -> None:
    secrets = (SECRET, SECRET.hex().encode(), base64.b64encode(SECRET)[:40], repr(SECRET)[2:-1].encode())
    for form in (*secrets, *(words.encode() for words in PLANTED), b"orchid", b"lantern"):
        assert form not in text, form


@pytest.mark.long
def test_sealed_run_with_experts_matches_plain_run(place, tmp_path):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        runs = pair(place, tmp_path, "text", "fp8.recipe=off")
    assert apart(runs) < 1e-5
    key = ["--key-file", str(place / "seal.key"), "--model", str(place / "text")]
    assert main(["unseal", "model", str(runs[1].dir / "hf"), str(tmp_path / "back"), *key]) == 0
    plain, back = (load_file(folder / "model.safetensors") for folder in (runs[0].dir / "hf", tmp_path / "back"))
    began = load_file(place / "text" / "model.safetensors")
    for name, tensor in plain.items():
        assert (back[name] - tensor).norm() <= 0.1 * (tensor - began[name]).norm() + 1e-7, name

    assert main(["report", str(runs[1].dir)]) == 0
    files = [file for file in runs[1].dir.rglob("*") if file.is_file()]
    assert {"metrics.jsonl", "config.yaml"} < {file.name for file in files} and any(f.suffix == ".html" for f in files)
    for file in [*files, *(f for name in ("text-twin", "text-rows") for f in (place / name).iterdir())]:
        nothing_plain(file.read_bytes())
        nothing_plain(str(file.relative_to(place.parent if file.is_relative_to(place) else tmp_path)).encode())
    nothing_plain((runs[1].dir / "skipped.jsonl").read_bytes())
    assert "left out (dropped) when it was sealed" in (runs[1].dir / "skipped.jsonl").read_text()


@pytest.mark.long
def test_adapter_run_on_sealed_base_matches_plain_run(place, tmp_path):
    """Both begin from one adapter of layers and experts; what the sealed run trained is the plain run's, unsealed."""
    plain, twin, key = place / "text", place / "text-twin", sealing.Key(SECRET)
    adapters.save(attached(plain), tmp_path / "plain", plain)
    sealing.seal_adapter(tmp_path / "plain", tmp_path / "sealed", twin, key)
    runs = []
    for sealed, name in ((False, "plain"), (True, "sealed")):
        more = ("train.precision=fp32", f"lora={{rank: 4, alpha: 8, adapter: {tmp_path / name}}}")
        runs.append(train.run(configured(place, "text", sealed, tmp_path / f"s{sealed:d}", *more)))
    assert apart(runs) < 1e-5
    sealing.unseal_adapter(runs[1].dir / "adapter", tmp_path / "back", plain, key)
    file = "adapter_model.safetensors"
    began, here, back = (load_file(f / file) for f in (tmp_path / "plain", runs[0].dir / "adapter", tmp_path / "back"))
    for name, tensor in here.items():
        assert (back[name] - tensor).norm() <= 0.1 * (tensor - began[name]).norm() + 1e-7, name


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_sealed_image_run_in_fp8_matches_plain_run(place, tmp_path, recipe):
    """Scales are equal. But another order of fp32 sums turns some roundings to FP8, as another machine does, and what
    is left of that in a loss falls with the tokens that it is a mean of: here all of eight rows."""
    assert apart(pair(place, tmp_path, "see", f"fp8.recipe={recipe}", "train.global_batch=8")) < 1e-3


@pytest.fixture(scope="module")
def pairs(place: Path) -> Path:
    """Pairs for the text model, the fourth too long, and their sealed twins."""
    rows = [{"prompt": [{"role": "user", "content": f"{PLANTED[1]}?" * (1 + 99 * (n == 3))}],
             "chosen": f"{PLANTED[0]} {n}", "rejected": f"{PLANTED[1]} {n}"} for n in range(16)]  # fmt: skip
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = ["seal", "data", str(place / "pairs.jsonl"), str(place / "pairs-rows"), "train.phase=preference"]
    of = ["train.seq_length=192", "--model", str(place / "text"), "--key-file", str(place / "seal.key")]
    assert main([*made, *of]) == 0
    return place / "pairs-rows"


def preferring(place: Path, sealed: bool, dir: Path, *more: str):
    rows = place / ("pairs-rows" if sealed else "pairs.jsonl")
    of = (f"data.train=[{{path: {rows}}}]", f"data.eval=[{{path: {rows}}}]", "train.phase=preference", *more)
    return configured(place, "text", sealed, dir, *of)


@pytest.mark.long
def test_sealed_preference_run_matches_plain_run(place, pairs, tmp_path):
    more = ("preference.reference=disk", "run.eval_every=5")
    runs = [rl.run(preferring(place, sealed, tmp_path / f"s{sealed:d}", *more)) for sealed in (False, True)]
    assert apart(runs) < 1e-4
    here, there = (json.loads((run.dir / "result.json").read_text())["eval"] for run in runs)
    assert here["questions"] == there["questions"] == 15
    for name in ("answer_loss", "preference_loss"):
        assert there[name] == pytest.approx(here[name], rel=1e-4)
    for file in (f for folder in (runs[1].dir, pairs) for f in folder.rglob("*") if f.is_file()):
        nothing_plain(file.read_bytes())


def test_sealed_pairs_are_read_as_written(place, pairs, tmp_path):
    cfg = preferring(place, True, tmp_path / "run")
    processor = models.load_processor(cfg.model.path)
    rows = data.preference_rows(cfg, processor, cfg.data.train)[1][0]
    assert len(rows) == 16 and len(SealedRows(pairs)) == 32
    one = rows[2]
    assert [*one.chosen.input_ids] != [*one.rejected.input_ids] and one.row == one.rejected.row == 2
    with pytest.raises(data.LongSample, match="row 3.*left out"):
        rows[3]
    for over, words in (
        ((f"data.train=[{{path: {place / 'text-rows'}}}]",), "has no pairs, but this run is of phase preference"),
        (("train.phase=sft",), "has pairs, but this run is of phase sft"),
    ):
        with pytest.raises(data.DataError, match=words):
            data.preference_rows(other := override(cfg, over), processor, other.data.train)
    with pytest.raises(ConfigError, match="kto learns from labelled answers"):
        override(cfg, ["preference.loss=kto"])


def test_sealed_and_plain_inputs_are_not_mixed(place, tmp_path):
    """A model, or rows, of another world are refused before anything is built."""
    for sealed, key, path, words in (
        (True, "model.path", place / "text", "is not sealed"),
        (False, "model.path", place / "text-twin", "plain rows are noise to it"),
        (True, "data.train", place / "text.jsonl", "is not sealed"),
        (False, "data.train", place / "text-rows", "contains sealed rows"),
    ):
        value = f"[{{path: {path}}}]" if key == "data.train" else path
        cfg = configured(place, "text", sealed, tmp_path / "run", f"{key}={value}")
        with pytest.raises(data.DataError, match=words) as refused:
            train.run(cfg)
        nothing_plain("".join(traceback.format_exception(refused.value)).encode())
    adapter = tmp_path / "adapter"
    adapters.save(attached(place / "text"), adapter, place / "text")
    with pytest.raises(data.DataError, match="is not sealed, and .* is sealed with the key"):
        train.run(configured(place, "text", True, tmp_path / "run", f"lora={{rank: 4, alpha: 8, adapter: {adapter}}}"))
    other = tmp_path / "other"
    sealing.seal_model(place / "text", other, sealing.Key(SECRET[::-1]))
    with pytest.raises(data.DataError, match="to each other they are noise"):
        train.run(configured(place, "text", True, tmp_path / "run", f"model.path={other}"))


def test_sealed_rows_are_read_as_written(place, tmp_path, monkeypatch):
    plain = data.read(configured(place, "text", False, tmp_path).data.train[0])
    sealed = SealedRows(place / "text-rows")
    assert len(sealed) == len(plain) == 25
    with pytest.raises(data.LongSample, match="left out"):
        sealed[5]
    assert (sealed[0].labels >= 0).sum() > 3 and sealed[0].id is None
    seen = SealedRows(place / "see-rows")[0]
    assert seen.pixel_values.shape[0] == seen.image_grid_thw.prod() and seen.images == 1

    short = override(configured(place, "text", True, tmp_path / "run"), ["train.seq_length=8", "train.steps=1"])
    with pytest.raises(data.DataError, match="none of its 25 rows fits into train.seq_length: 8"):
        train.run(short)
    write_new(tmp_path / "files.key")
    monkeypatch.setenv(encryption.FILE, str(tmp_path / "files.key"))
    assert main(["encrypt", str(place / "text-rows"), str(tmp_path / "stored")]) == 0
    stored = SealedRows(tmp_path / "stored")
    assert [*stored[0].input_ids] == [*sealed[0].input_ids] and len(stored) == 25
    whole = (place / "text-rows" / "rows.arrow").read_bytes()
    (broken := tmp_path / "broken").mkdir()
    (broken / "sealed.json").write_bytes((place / "text-rows" / "sealed.json").read_bytes())
    (broken / "rows.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(data.DataError, match="not a valid Arrow file"):
        SealedRows(broken)


def test_key_has_one_purpose(place, tmp_path, capsys, monkeypatch):
    """The key that sealed encrypts neither what it sealed nor a run on it, and opens no files."""
    monkeypatch.setenv(encryption.FILE, "of another command")  # what is set below is put back
    seal, files, twin = str(place / "seal.key"), str(tmp_path / "files.key"), str(place / "text-twin")
    write_new(files)
    stored, target, why = str(tmp_path / "stored"), str(tmp_path / "target"), "A key has one purpose"
    assert main(["encrypt", twin, stored, "--key-file", files]) == 0
    model = ["--model", str(place / "text")]
    for line, words in (
        (["encrypt", twin, target, "--key-file", seal], why),
        (["encrypt", f"{twin}/config.json", target, "--key-file", seal], why),
        (["encrypt", stored, target, "--old-key", files, "--key-file", seal], why),
        (["unseal", "model", stored, target, "--key-file", seal, *model], "name its key with --files-key"),
        (["unseal", "model", stored, target, "--key-file", seal, "--files-key", seal, *model], why),
    ):
        assert main(line) == 2 and words in capsys.readouterr().err and not Path(target).exists()
    assert main(["unseal", "model", stored, target, "--key-file", seal, "--files-key", files, *model]) == 0
    assert "is encrypted, but" in (said := capsys.readouterr().err) and "run octavo encrypt on it" in said
    name = "model.safetensors"
    assert (Path(target) / name).read_bytes() == (place / "text" / name).read_bytes()
    monkeypatch.setenv(encryption.FILE, seal)
    with pytest.raises(train.TrainError, match=why):
        train.run(configured(place, "text", True, tmp_path / "run", "run.encrypt=true"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.system=Be brief.", "numbers already"),
        ("data.max_pixels=1000", "seal data"),
        ("data.video={fps: 2}", "seal data"),
        ("data.train.0.format=messages", "has no effect on a sealed data set"),
        ("train.phase=rl", "phase rl rewards text"),
    ],
)
def test_settings_without_effect_on_sealed_rows_are_rejected(place, tmp_path, setting, words):
    with pytest.raises(ConfigError, match=words):
        configured(place, "text", True, tmp_path, setting)


def test_rows_with_video_cannot_be_sealed(place, tmp_path, capsys):
    digit_clips.write(tmp_path / "clips", train=2, test=2)
    key = ["--key-file", str(place / "seal.key"), "--model", str(place / "see")]
    assert main(["seal", "data", str(tmp_path / "clips/train.json"), str(tmp_path / "rows"), *key]) == 1
    assert "row 0: contains videos" in capsys.readouterr().err and not (tmp_path / "rows").exists()
    tiny.write("internvl", tmp_path / "frames", size="mini")  # to it a video is images
    made = ["seal", "data", str(tmp_path / "clips/train.json"), str(tmp_path / "rows"), *key[:2], "--model"]
    assert main([*made, str(tmp_path / "frames"), "train.seq_length=512"]) == 0
    text = f"model: {{path: {tmp_path / 'frames'}}}\ndata: {{train: [{{path: {tmp_path / 'clips/train.json'}}}]}}\n"
    cfg = load_config_text(text + "train: {steps: 1, seq_length: 512}\nrun: {dir: a}\n")
    encoder, (rows,) = data.training_rows(cfg, models.load_processor(tmp_path / "frames"))
    (plain,) = encoder.encode_all([rows[0]])
    sealed = SealedRows(tmp_path / "rows")[0]
    pixels = [one.pixel_values.flatten() for one in (plain, sealed)]
    assert plain.videos and not np.array_equal(*pixels) and np.array_equal(*map(np.sort, pixels))


def test_commands_report_missing_arguments(place, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(encryption.FILE, raising=False)  # where `place` was made just now
    assert main(["seal", "model", "a", "b"]) == 1 and "there is no key" in capsys.readouterr().err
    key = ["--key-file", str(place / "seal.key")]
    for line, words in (
        (["seal", "data", "a", "b", *key], "--model FOLDER"),
        (["seal", "model", "a", *key], "SRC and DST"),
        (["seal", "model", "a", "b", "train.steps=1", *key], "train.steps=1 is a setting of seal data"),
        (["unseal", "adapter", "a", "b", *key], "--model FOLDER"),
        (["unseal", "model", str(tmp_path / "gone"), "b", *key], "gone is not a folder"),
    ):
        assert main(line) in (1, 2) and words in capsys.readouterr().err
    made = ["seal", "data", str(place / "text.jsonl"), str(tmp_path / "rows"), "--model", str(place / "text"), *key]
    assert (
        main([*made, "train.phase=rl", "rl.rewards=[exact_match]"]) == 1
        and "only rows of sft, pretrain and preference" in capsys.readouterr().err
    )
    labelled = [*made, "train.phase=preference", "preference.loss=kto"]
    assert main(labelled) == 1 and "labelled answers cannot" in capsys.readouterr().err
    assert (
        main([*made, "data.on_long=error", "train.seq_length=8"]) == 1 and "train.seq_length" in capsys.readouterr().err
    )
    assert not (tmp_path / "rows").exists()
