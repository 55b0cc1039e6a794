"""A reward model: a folder with a sequence classification model that scores a conversation, from its text and, for
vision models, from its images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo import data, fp8
from octavo.base import accelerator
from octavo.base.model_families import trained_families
from octavo.data.encoding.sample import IGNORE, Sample, inputs_of_processor
from octavo.data.errors import MediaProblem
from octavo.data.rows.conversations import PLACEHOLDER
from octavo.data.rows.image_refs import load as opened
from octavo.models import ModelError, describe, encode_conversation, freeze_all, load, load_processor, read_config
from octavo.models.structure.skeleton import SCORING_SUFFIX
from octavo.rl.rewards.entry import RewardError
from octavo.train.artifacts.load_target import make_fitting_policy


class RewardModel:
    """Scores conversations with the folder's processor and chat template, the completion as the last turn.

    folder       config.json with one label, safetensors, tokenizer, chat template; for images also a processor
    load_in_fp8  rowwise, blockwise or tensorwise: linear layers are quantized to frozen FP8 codes while they are read,
                 and multiply in FP8. A folder with FP8 codes keeps them and uses the recipe that fits them
    batch        conversations at a time, padded on the right to the longest
    device       device of the model; it computes in BF16 on a GPU, in fp32 on a CPU

    Raises RewardError for a folder without a reward model, and ModelError for one that cannot be loaded.
    """

    def __init__(
        self, folder: Path, load_in_fp8: str | None = None, batch: int = 16, device: str | torch.device = "cpu"
    ) -> None:
        self.folder, self.batch, self.device = folder, batch, torch.device(device)
        if type(batch) is not int or batch < 1:
            raise RewardError(f"reward {folder.name} has the batch {batch!r}; expected a whole number of at least 1")
        config = read_config(folder)
        kind = (config.architectures or ["no architecture"])[0]
        if not kind.endswith(SCORING_SUFFIX) or config.num_labels != 1:
            raise RewardError(
                f"{folder} contains {kind} with num_labels {config.num_labels}, but a reward model is a "
                "...ForSequenceClassification with num_labels 1; use a folder with a trained reward model"
            )
        dtype = accelerator.autocast_dtype(self.device) or torch.float32
        self.model = load(folder, dtype, self.device, load_in_fp8=load_in_fp8, scores=True)
        family = describe(self.model)
        policy = make_fitting_policy(self.model, family)  # None without FP8 codes: the model stays in high precision
        if policy is not None:
            fp8.apply(self.model, fp8.plan(self.model, policy, family.components))
        freeze_all(self.model)
        self.processor = load_processor(folder)
        self.tokenizer = self.processor.tokenizer
        if self.processor.chat_template is None:
            raise RewardError(f"{folder} has no chat template, which is needed to format conversations; add one")
        text = self.model.config.get_text_config()
        if text.pad_token_id is None:
            text.pad_token_id = self.tokenizer.pad_token_id
        self.pad_id = text.pad_token_id
        self.max_tokens = getattr(text, "max_position_embeddings", None) or self.tokenizer.model_max_length
        self.has_vision = family.has_vision

    def __call__(self, completions: Sequence[str], columns: dict[str, list[Any]]) -> list[float | str]:
        """Score completions: returns a number for each, or the reason why there is none.

        Columns: `messages` (turns) or `prompt` (a text), and `images` (files or
        :class:`octavo.data.rows.image_refs.InlineImage`, one for each `<image>` in the turns). A text model rejects
        rows with images."""
        values: list[float | str] = []
        for first in range(0, len(completions), self.batch):
            rows = range(first, min(first + self.batch, len(completions)))
            images: dict[Any, Any] = {}  # shared by the completions of a prompt
            samples = [
                self._sample(completions[row], {key: column[row] for key, column in columns.items()}, images)
                for row in rows
            ]
            scores = iter(self._scores([sample for sample in samples if not isinstance(sample, str)]))
            values += [sample if isinstance(sample, str) else next(scores) for sample in samples]
        return values

    def _sample(self, completion: str, row: dict[str, Any], images: dict[Any, Any]) -> Sample | str:
        """Encode a conversation, or return the reason why it cannot be scored. `images`: file -> open image, a cache
        that this call extends."""
        files = row.get("images") or []
        if files and not self.has_vision:
            return (
                f"has images, and the reward model ({self.model.config.model_type}) reads only text; models that read "
                f"images are ...{SCORING_SUFFIX} of {', '.join(trained_families('images'))}"
            )
        if row.get("videos"):
            return "has videos, which reward models do not support in this version; use another reward for such rows"
        question_turns = row.get("messages") or row.get("prompt")
        turns = question_turns if isinstance(question_turns, list) else [{"role": "user", "content": question_turns}]
        if question_turns is None:
            return "has neither a column 'messages' nor a column 'prompt', which the reward model reads"
        if self.has_vision:
            turns = [{**turn, "content": _parts(turn.get("content"), bool(files))} for turn in turns]
        answer = {"role": "assistant", "content": _parts(completion, False) if self.has_vision else completion}
        try:
            for file in files:
                images[file] = images.get(file) or opened(file, math.inf)  # its size was checked before
            encoded = encode_conversation(
                self.processor, [*turns, answer], [images[file] for file in files], answered=True
            )
        except (ModelError, MediaProblem) as cause:
            return str(cause)
        arrays = {key: value.numpy() for key, value in encoded.items()}
        ids, kinds = arrays["input_ids"][0], arrays.get("mm_token_type_ids")
        if len(ids) > self.max_tokens:
            return f"has {len(ids)} tokens, but the reward model takes at most {self.max_tokens}"
        return Sample(
            ids, np.full_like(ids, IGNORE), None if kinds is None else kinds[0], arrays.get("pixel_values"),
            arrays.get("image_grid_thw"), len(files),
            extra=inputs_of_processor(self.processor, arrays) if files else {},
        )  # fmt: skip

    @torch.no_grad()
    def _scores(self, samples: list[Sample]) -> list[float]:
        if not samples:
            return []
        batch = data.collate(samples, self.pad_id)
        inputs = {key: value.to(self.device) for key, value in batch.items() if key not in ("labels", "meta")}
        return self.model(**inputs).logits[:, 0].double().tolist()


def _parts(content: Any, images: bool) -> Any:
    """Split the content of a turn into the parts that the chat template of a vision-language model takes; with `images`
    each placeholder becomes an image."""
    if not isinstance(content, str):
        return content
    pieces = [{"type": "text", "text": piece} for piece in (content.split(PLACEHOLDER) if images else [content])]
    parts = [part for piece in pieces for part in ({"type": "image"}, piece)][1:]
    return [part for part in parts if part.get("text") != ""] or pieces
