"""answers.jsonl: the first answers of each evaluation, for people to read.

{"step", "file", "row", "prompt", "wanted", "said", "right" or null, "reward" or null}; texts of at most :data:`LENGTH`
characters, of a prompt its end. With `run.encrypt` it is answers.jsonl.aes, of encrypted lines.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.base.encryption import SUFFIX, append
from octavo.train.forward.evaluation import Answer
from octavo.train.run_dir.run_dir import truncate_metrics

ANSWERS = "answers.jsonl"
LENGTH = 600


class Answers:
    """Appends to the file of a run; what stands there of steps behind `step`, where the run goes on, is dropped."""

    def __init__(self, directory: Path, tokenizer: Any, step: int, encrypt: bool = False) -> None:
        self.file, self.tokenizer = directory / (ANSWERS + SUFFIX * encrypt), tokenizer
        truncate_metrics(self.file, step)

    def write(self, step: int, answers: Sequence[Answer]) -> None:
        rows = (
            {
                "step": step, "file": one.file, "row": one.row, "prompt": self._text(one.before)[-LENGTH:],
                "wanted": self._text(one.wanted)[:LENGTH], "said": self._text(one.said)[:LENGTH],
                "right": one.right, "reward": one.reward,
            }
            for one in answers
        )  # fmt: skip
        append(self.file, (json.dumps(row) + "\n" for row in rows))

    def _text(self, said: Sequence[int] | str) -> str:
        """Text, or what tokens say, with a stroke where control tokens stand."""
        if isinstance(said, str):
            return said
        control = {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}
        parts = (list(part) for special, part in itertools.groupby(said, control.__contains__) if not special)
        lines = (str(self.tokenizer.decode(part)).strip() for part in parts)
        return " | ".join(line for line in lines if line)
