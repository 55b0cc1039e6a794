"""The first answers of evaluations: what of them is kept, and what a resumed run drops."""

import json
from types import SimpleNamespace

import torch

from octavo.base import encryption
from octavo.data.batching.collate import Meta
from octavo.rl.phases.completions_log import CompletionsLog
from octavo.train.callbacks.evaluation_and_health import ANSWERS, MAX_CHARS, AnswersLog
from octavo.train.forward.evaluation import Answer, AnswerSpan, _logged_answers

WORDS = {0: "<end>", **{number: f"w{number}" for number in range(1, 9)}}
TOKENIZER = SimpleNamespace(
    added_tokens_decoder={0: SimpleNamespace(special=True)}, decode=lambda ids: " ".join(WORDS[n] for n in ids)
)


def test_logged_answer_ends_at_its_first_wrong_token():
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 7, 8, 0, 0, 0]])
    likeliest = torch.tensor([[9, 3, 9, 9, 6], [7, 8, 0, 0, 0]])
    batch = {"input_ids": ids, "meta": Meta(files=("a", "b"), rows=(4, 5))}
    answers = [AnswerSpan(0, 0, 2, 5), AnswerSpan(0, 1, 5, 6), AnswerSpan(1, 0, 1, 3)]
    found = list(_logged_answers(likeliest, batch, answers, [False, True, True], 4))
    assert found == [Answer("a", 4, [1, 2], [3, 4, 5], [3, 9], False), Answer("b", 5, [1], [7, 8], [7, 8], True)]
    assert [one.row for one in _logged_answers(likeliest, batch, answers, [False, True, True], 1)] == [4]
    assert not list(_logged_answers(likeliest, batch, answers, [False, True, True], -3))


def test_encrypted_answers_of_later_steps_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setenv(encryption.VALUE, "abcd" * 16)
    monkeypatch.delenv(encryption.FILE, raising=False)
    for step in (2, 4):
        AnswersLog(tmp_path, TOKENIZER, 9, encrypt=True).write(step, [Answer("f", 1, [1], [4], "words", None, 0.5)])
    CompletionsLog(tmp_path, 1, encrypt=True).write(['{"step": 2, "completion": "words"}\n', "beyond the first\n"])
    lines = (tmp_path / f"{ANSWERS}.aes").read_bytes().splitlines()
    AnswersLog(tmp_path, TOKENIZER, 3, encrypt=True)
    CompletionsLog(tmp_path, 1, encrypt=True).begin(3)
    assert (tmp_path / f"{ANSWERS}.aes").read_bytes() == lines[0] + b"\n"
    assert json.loads(encryption.decrypt_line(lines[1], "it"))["said"] == "words"
    shown = (tmp_path / "completions.jsonl.aes").read_bytes().splitlines()
    assert [json.loads(encryption.decrypt_line(line, "it"))["completion"] for line in shown] == ["words"]


def test_answers_are_text_and_later_ones_are_dropped_on_resume(tmp_path):
    answers = AnswersLog(tmp_path, TOKENIZER, 0)
    for step in (2, 4):
        said = [Answer("f", 1, [1, 0, 2, 3], [4], "x" * 9999, None, 0.5)]
        answers.write(step, said)
    AnswersLog(tmp_path, TOKENIZER, 3).write(5, [Answer("f", 1, [0], [4], [0], True)])
    first, second = [json.loads(line) for line in (tmp_path / ANSWERS).read_text().splitlines()]
    assert first == {
        "step": 2, "file": "f", "row": 1, "prompt": "w1 | w2 w3", "wanted": "w4", "said": "x" * MAX_CHARS,
        "right": None,
        "reward": 0.5,
    }  # fmt: skip
    assert (second["step"], second["prompt"], second["said"]) == (5, "", "")
