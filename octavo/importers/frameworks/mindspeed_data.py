"""Rows of MindSpeed-MM: `basic_parameters` and `preprocess_parameters`, and its rule about reasoning."""

from __future__ import annotations

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft
from octavo.importers.common.prefixed_keys import Under

#: chat templates that write a block of thinking there
_REASONING = ("qwen3_vl", "qwen3_omni", "qwen3_6", "kimi_k25", "glm4.1v", "glm4v_moe")


def rows(draft: Draft, training: Under) -> None:
    at, before = "data.dataset_param.basic_parameters.", "data.dataset_param.preprocess_parameters."
    u, p = Under(draft, at), Under(draft, before)
    names = u.words("dataset")
    for number, name in enumerate(names):
        entry = model_and_data.dataset(draft, "train", number, name, u("dataset"), hub=False)
        if folder := u.text("dataset_dir"):
            draft.put(
                f"{entry}.images", draft.path(folder, hub=False), u("dataset_dir"), why="images are relative to it"
            )
        if (limit := u.whole("max_samples")) is not None:
            draft.put(f"{entry}.max_samples", limit, u("max_samples"))
        if u.flag("streaming"):
            model_and_data.stream(draft, entry, u("streaming"))
        else:
            u.same("streaming", why="rows are read into the cache")
        if number == 0 and draft.sizes is None:
            draft.sizes = steps_and_schedule.rows_of(draft, name)
    # Held-out rows have the same keys in a second section.
    held = "data.val_dataset_param.basic_parameters."
    for number, name in enumerate(draft.words(f"{held}dataset")):
        entry = model_and_data.dataset(draft, "eval", number, name, f"{held}dataset", hub=False)
        if folder := draft.text(f"{held}dataset_dir"):
            draft.put(f"{entry}.images", draft.path(folder, hub=False), f"{held}dataset_dir")
        if (limit := draft.whole(f"{held}max_samples")) is not None:
            draft.put(f"{entry}.max_samples", limit, f"{held}max_samples")
    if not names:
        draft.put("data.train.0.path", "/path/to/data.json", why="to be filled in: no key named data")
        draft.note("data.train is to be filled in")
    length = u.whole("cutoff_len") or training.whole("seq_length") or 2048
    draft.put("train.seq_length", length, u("cutoff_len"), training("seq_length"))
    draft.put("data.on_long", "cut", why="longer rows are truncated")
    _thinking(draft, u)
    if u.flag("train_on_prompt"):
        u.put("data.train_on_prompt", True, "train_on_prompt")
    else:
        u.same("train_on_prompt", why="loss falls on answers")
    if u.flag("mask_history"):
        model_and_data.last_answer(draft, u("mask_history"))
    else:
        u.same("mask_history", why="every answer has loss")
    for side in ("max", "min"):
        if pixels := p.whole(f"image_{side}_pixels"):
            p.put(f"data.{side}_pixels", pixels, f"image_{side}_pixels")
    film = {ours: p(f"video_{theirs}") for ours, theirs in model_and_data.FILM.items()}
    model_and_data.video(
        draft, model_and_data.filmed(draft, draft.text("model.model_name_or_path")), "sft", film, model_and_data.FILMED
    )
    if (workers := draft.whole("data.dataloader_param.num_workers")) is not None:
        draft.put("data.workers", workers, "data.dataloader_param.num_workers")


def _thinking(draft: Draft, u: Under) -> None:
    """`enable_thinking` there is no variable of the chat template, but a rule about reasoning in the rows: false takes
    it out of the answers; true gives an empty block that was added to an answer a loss of its own. Templates that know
    no reasoning do not read it."""
    key, template = u("enable_thinking"), u.text("template")
    if template is None:
        model_and_data.thinking(draft, key)
        return
    if template not in _REASONING:
        draft.dead(key, why=f"the template {template} knows no reasoning, and reads no such rule")
    elif u.flag("enable_thinking") is False:
        why = "reasoning is taken out of answers there; here it is read, and has no loss"
        draft.put("data.mask_reasoning", True, key, why=why)
    elif key not in draft.source_keys or u.has("enable_thinking"):
        draft.put("data.mask_empty_think", False, key, why="an empty block of thinking has loss there")
    else:
        draft.same(key, why="an empty block of thinking has no loss (data.mask_empty_think)")
