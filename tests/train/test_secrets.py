"""Planted secrets: a sentence in the data, and a key; every byte that a run writes or prints is searched for them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import train
from octavo.base import encryption
from octavo.base.encryption.key import write_new
from octavo.cli.main import main
from octavo.config import load_config
from octavo.data.storage import cache
from octavo.models.tiny import tiny
from tests.train.conftest import Rows

SENTENCE = "the owl flies at midnight"
SECRET = bytes(range(7, 39))
WORDS = [  # the sentence, as tokens of one byte or as JSON would write it too, and the key in every form
    SENTENCE.encode(), b"owl flies", SECRET, SECRET.hex().encode(), SECRET.hex().upper().encode(),
    base64.b64encode(SECRET).rstrip(b"="), base64.urlsafe_b64encode(SECRET).rstrip(b"="), repr(SECRET)[2:-1].encode(),
]  # fmt: skip


def rows(count: int) -> Iterator[str]:
    for n in range(count):
        turns = [{"role": "user", "content": f"{n}: say it"}, {"role": "assistant", "content": SENTENCE}]
        yield json.dumps({"id": f"{SENTENCE} {n}", "messages": turns}) + "\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key, an encrypted mini Qwen3, rows of which one quotes the sentence where a role belongs, and a
    configuration; what is plain of them lies elsewhere."""
    here, plain = tmp_path_factory.mktemp("secrets"), tmp_path_factory.mktemp("plain")
    (plain / "key").write_text(SECRET.hex())
    (plain / "key").chmod(0o600)
    tiny.write("qwen3", plain / "model", size="mini")
    bad = json.dumps({"messages": [{"role": SENTENCE, "content": SENTENCE}]}) + "\n"
    (plain / "rows.jsonl").write_text(bad + "".join(rows(40)))
    (plain / "held.jsonl").write_text("".join(rows(3)))
    key = ["--key-file", str(plain / "key")]
    for name in ("model", "rows.jsonl", "held.jsonl"):
        assert main(["encrypt", str(plain / name), str(here / name), *key]) == 0
    os.environ.pop(encryption.FILE)
    (here / "run.yaml").write_text(f"""
model: {{path: model}}
fp8: {{recipe: blockwise}}
data: {{train: [{{path: rows.jsonl}}], eval: [{{path: held.jsonl}}], cache: {here / "cache"}, on_bad_sample: skip}}
train: {{steps: 4, seq_length: 64, micro_batch: 2, global_batch: 8, lr: 1e-2, warmup: 1}}
run: {{dir: {here / "run"}, save_every: 2, eval_every: 2, threads: 1, encrypt: true, save: async, milestones: [2]}}
""")
    shutil.copy(plain / "key", here.parent / "outside.key")
    return here


@pytest.fixture(autouse=True)
def key(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(encryption.VALUE, raising=False)
    monkeypatch.setenv(encryption.FILE, str(place.parent / "outside.key"))
    monkeypatch.setattr(cache, "SMALL_FILE", 0)  # as of large files: what is made of them would lie in the cache


def searched(*places: Path | str) -> int:
    """The files that were searched, of folders all that is in them, and texts; nothing is found."""
    count = 0
    for one in places:
        files = [one] if isinstance(one, str) else [f for f in one.rglob("*") if f.is_file()]
        for file in files:
            raw = file.encode() if isinstance(file, str) else file.read_bytes()
            assert not [word for word in WORDS if word in raw], f"{file!s:.200} holds what is secret"
            count += 1
    return count


def test_encrypted_run_writes_no_plain_text_and_resumes_only_with_its_key(place, capfd, monkeypatch, uncounted):
    assert main(["train", str(place / "run.yaml")]) == 0
    told = "".join(capfd.readouterr())
    assert "1 skipped" in told and "skipped.jsonl.aes" in told
    run = place / "run"
    names = {str(file.relative_to(run)) for file in run.rglob("*")}
    assert names >= {
        "answers.jsonl.aes", "skipped.jsonl.aes", "checkpoints/step_4/__0_0.distcp", "milestones/step_2/state.json",
        "hf/model.safetensors", "hf/tokenizer.json", "page.html", "config.yaml", "environment.json", "metrics.jsonl",
        "tensorboard", "result.json", "proof.json",
    }  # fmt: skip
    assert searched(told, run, place / "cache", place / "model") > 30
    for name, field in (("answers", "wanted"), ("skipped", "reason")):  # what its owner sees
        assert main(["decrypt", str(run / f"{name}.jsonl.aes"), str(place.parent / f"{name}.jsonl")]) == 0
        plain = (place.parent / f"{name}.jsonl").read_text()
        assert SENTENCE in json.loads(plain.splitlines()[0])[field]
        with pytest.raises(AssertionError, match="holds what is secret"):  # the search finds what is there
            searched(plain)

    again = place / "again"  # as if it had been stopped
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints/step_4")
    (again / "result.json").unlink()
    keys = ["run.resume=auto", f"run.dir={again}", "run.tensorboard=false", "run.hf=false", "data.workers=1"]
    assert main(["train", str(place / "run.yaml"), *keys]) == 0
    finals = [json.loads((folder / "result.json").read_text()) for folder in (run, again)]
    assert finals[0]["final"]["loss"] == finals[1]["final"]["loss"] and finals[0]["eval"] == finals[1]["eval"]
    assert searched("".join(capfd.readouterr()), again) > 15
    assert main(["eval", str(again), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["loss"] == pytest.approx(finals[0]["eval"]["loss"], 1e-6)
    monkeypatch.delenv(encryption.FILE)
    assert main(["eval", str(again)]) == 1 and "there is no key" in capfd.readouterr().err


def test_errors_of_encrypted_runs_quote_no_data(place, capfd, monkeypatch, tmp_path):
    command = ["train", str(place / "run.yaml"), f"run.dir={tmp_path / 'a'}", "train.steps=2"]
    assert main([*command, "data.on_bad_sample=error"]) == 1  # its reason quotes the row
    told = "".join(capfd.readouterr())
    assert "rows.jsonl, row 0 cannot be used" in told and "run.encrypt keeps it out of messages" in told

    named = tmp_path / "named.jsonl"  # what no column is known of is a whole file's fault, and no row's
    named.write_bytes(encryption.encrypt(json.dumps({SENTENCE: SENTENCE}).encode() + b"\n"))
    assert main([*command, f"run.dir={tmp_path / 'n'}", f"data.train.0.path={named}"]) == 1
    told += (found := "".join(capfd.readouterr()))
    assert "start without run.encrypt where the data may be read" in found and "skipped.jsonl.aes" not in found

    damaged = tmp_path / "damaged.jsonl"
    raw = bytearray((place / "rows.jsonl").read_bytes())
    raw[200] ^= 1
    damaged.write_bytes(raw)
    assert main([*command, f"run.dir={tmp_path / 'b'}", f"data.train.0.path={damaged}"]) == 1
    told += (found := "".join(capfd.readouterr()))
    assert "damaged.jsonl is damaged: chunk 0 of 1 (bytes 70 to" in found

    asked = [f"run.dir={tmp_path / 'c'}", "train.steps=2", "data.on_bad_sample=error"]
    with pytest.raises(train.TrainError, match="row 0 cannot be used") as quoting:
        train.run(load_config(place / "run.yaml", asked))
    told += "".join(traceback.format_exception(quoting.value))
    cfg = load_config(place / "run.yaml", asked[:2])
    with pytest.raises(
        train.TrainError, match="ZeroDivisionError"
    ) as broken:  # in the midst of a run, with rows and key in memory
        train.run(cfg, callbacks=[Rows(lambda row: 1 / 0)])
    told += "".join(traceback.format_exception(broken.value)) + "".join(capfd.readouterr())

    for key, why in ((None, "run.encrypt: there is no key"), (tmp_path / "other", "encrypted with another key")):
        if key is not None:
            write_new(key)
            monkeypatch.setenv(encryption.FILE, str(key))
        else:
            monkeypatch.delenv(encryption.FILE)
        assert main([*command, f"run.dir={tmp_path / 'd'}"]) == 1
        told += (found := "".join(capfd.readouterr()))
        assert why in found
    monkeypatch.setenv(encryption.FILE, str(place.parent / "outside.key"))
    assert main([*command, f"run.dir={tmp_path / 'd'}", "run.encrypt=false"]) == 1
    told += (found := "".join(capfd.readouterr()))
    assert "is encrypted, but run.encrypt is false" in found
    assert searched(told, tmp_path, place / "cache") > 10


REWARD = """
import os
def score(completions, answer, **more):
    assert not [name for name in os.environ if "OCTAVO_KEY" in name]
    return [len(c) / 10 for c in completions]
def fail(completions, answer, **more):
    raise ValueError(answer[0])
"""


def test_encrypted_preference_and_rl_runs_write_no_plain_text(place, tmp_path, capfd, uncounted):
    """What a reference says of answers is stored, completions are shown, and a reward that fails quotes a row."""
    asked = [{"role": "user", "content": "say it"}]
    for name, row in (
        ("pairs", {"prompt": asked, "chosen": SENTENCE, "rejected": "the owl flies away"}),
        ("prompts", {"prompt": asked, "answer": SENTENCE}),
    ):
        (tmp_path / f"{name}.jsonl").write_bytes(encryption.encrypt((json.dumps(row) + "\n").encode() * 8))
    (tmp_path / "own.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(f"""
model: {{path: {place / "model"}}}
fp8: {{recipe: blockwise}}
data: {{cache: {place / "cache"}}}
train: {{steps: 1, seq_length: 64, micro_batch: 4}}
run: {{threads: 1, encrypt: true, tensorboard: false}}
""")
    both, preference, rl = ["train", str(tmp_path / "run.yaml")], tmp_path / "preference", tmp_path / "rl"
    of = ["train.phase=preference", f"data.train=[{{path: {tmp_path}/pairs.jsonl}}]", f"run.dir={preference}"]
    assert main([*both, *of, "preference.reference=disk"]) == 0
    of = ["train.phase=rl", f"data.train=[{{path: {tmp_path}/prompts.jsonl}}]"]
    of += [f"rl={{prompts: 2, group: 2, max_new_tokens: 4, show: 4, rewards: ['{tmp_path}/own.py:score']}}"]
    assert main([*both, *of, f"run.dir={rl}"]) == 0
    assert encryption.is_encrypted(preference / "reference.safetensors") and (rl / "completions.jsonl.aes").is_file()
    assert main([*both, *of, f"run.dir={tmp_path / 'failed'}", f"rl.rewards=['{tmp_path}/own.py:fail']"]) == 1
    told = "".join(capfd.readouterr())
    assert "reward fail returned no number for 4 completions: the reason may quote" in told
    assert searched(told, tmp_path, place / "cache") > 30
    assert main(["decrypt", str(rl / "completions.jsonl.aes"), str(place.parent / "completions.jsonl")]) == 0
    assert SENTENCE in (place.parent / "completions.jsonl").read_text()


def test_a_plain_checkpoint_is_not_continued(place, tmp_path, capfd):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints/step_2").mkdir(parents=True)
    (run / "checkpoints/step_2/state.json").write_text("{}")
    resumed = ["train", str(place / "run.yaml"), f"run.dir={tmp_path / 'new'}"]
    assert main([*resumed, f"run.resume={run / 'checkpoints/step_2'}"]) == 1
    assert "is not encrypted, but run.encrypt is true" in "".join(capfd.readouterr())
