"""A reward model: a folder with a text model that gives each conversation one number (sequence classification)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo import fp8
from octavo.models import ModelError, describe, freeze_all, load, load_processor, read_config
from octavo.models.chat import render
from octavo.rl.rewards.entry import RewardError
from octavo.train.finished.target import fitting


class RewardModel:
    """Scores conversations by the folder's own tokenizer and chat template, the completion as the last turn.

    folder       config.json with one label, safetensors, tokenizer, chat template
    load_in_fp8  rowwise, blockwise, tensorwise: linear layers are frozen FP8 codes while they are read, and multiply
                 in FP8. A folder that holds codes keeps them, and multiplies by the recipe that fits them
    batch        conversations at a time, padded on the right to the longest
    device       where it computes; BF16 on a GPU, fp32 on a CPU

    Raises RewardError for a folder that is none, and ModelError for one that cannot be loaded.
    """

    def __init__(
        self, folder: Path, load_in_fp8: str | None = None, batch: int = 16, device: str | torch.device = "cpu"
    ) -> None:
        self.folder, self.batch, self.device = folder, batch, torch.device(device)
        if type(batch) is not int or batch < 1:
            raise RewardError(f"reward {folder.name} has the batch {batch!r}; expected a whole number from 1")
        config = read_config(folder)
        kind = (config.architectures or ["no architecture"])[0]
        if not kind.endswith("ForSequenceClassification") or config.num_labels != 1:
            raise RewardError(
                f"{folder} holds {kind} with num_labels {config.num_labels}, and a reward model is a "
                "...ForSequenceClassification with num_labels 1; name one that was trained to give rewards"
            )
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.model = load(folder, dtype, self.device, load_in_fp8=load_in_fp8, scores=True)
        family = describe(self.model)
        policy = fitting(self.model, family)
        if policy is not None:
            fp8.apply(self.model, fp8.plan(self.model, policy, family.components))
        freeze_all(self.model)
        self.processor = load_processor(folder)
        self.tokenizer = self.processor.tokenizer
        if self.processor.chat_template is None:
            raise RewardError(f"{folder} has no chat template, by which a conversation becomes its text; add one")
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.most = getattr(config, "max_position_embeddings", None) or self.tokenizer.model_max_length

    def __call__(self, completions: Sequence[str], columns: dict[str, list[Any]]) -> list[float | str]:
        """A number for each completion, or why there is none. Columns: `messages` (turns) or `prompt` (a text); rows
        with `images` are refused, for the model would judge what it has not seen."""
        values: list[float | str] = []
        for first in range(0, len(completions), self.batch):
            rows = range(first, min(first + self.batch, len(completions)))
            texts = [
                self._tokens(completions[row], {key: column[row] for key, column in columns.items()}) for row in rows
            ]
            scores = iter(self._scores([ids for ids in texts if not isinstance(ids, str)]))
            values += [ids if isinstance(ids, str) else next(scores) for ids in texts]
        return values

    def _tokens(self, completion: str, row: dict[str, Any]) -> list[int] | str:
        if row.get("images"):
            return "has images, and the reward model reads text alone"
        asked = row.get("messages") or row.get("prompt")
        turns = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
        if asked is None:
            return "has no column 'messages' and none named 'prompt', which the reward model reads"
        try:
            text = render(self.processor, [*turns, {"role": "assistant", "content": completion}])
        except ModelError as cause:
            return str(cause)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids if len(ids) <= self.most else f"has {len(ids)} tokens, and the reward model takes {self.most}"

    @torch.no_grad()
    def _scores(self, rows: list[list[int]]) -> list[float]:
        if not rows:
            return []
        longest = max(map(len, rows))
        pad = self.model.config.pad_token_id
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self.device)
        return self.model(input_ids=ids, attention_mask=mask).logits[:, 0].double().tolist()
