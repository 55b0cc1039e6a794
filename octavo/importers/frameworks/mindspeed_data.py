"""Data sets of MindSpeed-MM (`basic_parameters`, `preprocess_parameters`) and its handling of reasoning."""

from __future__ import annotations

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft
from octavo.importers.common.prefixed_keys import PrefixedDraft

#: chat templates that add a thinking block in MindSpeed-MM
_REASONING = ("qwen3_vl", "qwen3_omni", "qwen3_6", "kimi_k25", "glm4.1v", "glm4v_moe")


def translate_rows(draft: Draft, training: PrefixedDraft) -> None:
    at, preprocess_prefix = "data.dataset_param.basic_parameters.", "data.dataset_param.preprocess_parameters."
    u, p = PrefixedDraft(draft, at), PrefixedDraft(draft, preprocess_prefix)
    names = u.words("dataset")
    for number, name in enumerate(names):
        entry = model_and_data.add_dataset(draft, "train", number, name, u("dataset"), hub=False)
        if folder := u.text("dataset_dir"):
            draft.set(
                f"{entry}.images", draft.path(folder, hub=False), u("dataset_dir"), why="image paths are relative to it"
            )
        if (limit := u.integer("max_samples")) is not None:
            draft.set(f"{entry}.max_samples", limit, u("max_samples"))
        if u.flag("streaming"):
            model_and_data.set_streaming(draft, entry, u("streaming"))
        else:
            u.mark_default("streaming", why="rows are read into the cache")
        if number == 0 and draft.num_rows is None:
            draft.num_rows = steps_and_schedule.count_rows(draft, name)
    # Evaluation rows have the same keys in a second section.
    eval_prefix = "data.val_dataset_param.basic_parameters."
    for number, name in enumerate(draft.words(f"{eval_prefix}dataset")):
        entry = model_and_data.add_dataset(draft, "eval", number, name, f"{eval_prefix}dataset", hub=False)
        if folder := draft.text(f"{eval_prefix}dataset_dir"):
            draft.set(f"{entry}.images", draft.path(folder, hub=False), f"{eval_prefix}dataset_dir")
        if (limit := draft.integer(f"{eval_prefix}max_samples")) is not None:
            draft.set(f"{entry}.max_samples", limit, f"{eval_prefix}max_samples")
    if not names:
        draft.set("data.train.0.path", "/path/to/data.json", why="FILL IN: no key names training data")
        draft.add_note("FILL IN: set data.train")
    length = u.integer("cutoff_len") or training.integer("seq_length") or 2048
    draft.set("train.seq_length", length, u("cutoff_len"), training("seq_length"))
    draft.set("data.on_long", "cut", why="longer rows are truncated")
    _translate_thinking(draft, u)
    if u.flag("train_on_prompt"):
        u.set("data.train_on_prompt", True, "train_on_prompt")
    else:
        u.mark_default("train_on_prompt", why="only answers have loss")
    if u.flag("mask_history"):
        model_and_data.mark_last_answer_loss(draft, u("mask_history"))
    else:
        u.mark_default("mask_history", why="all answers have loss")
    for side in ("max", "min"):
        if pixels := p.integer(f"image_{side}_pixels"):
            p.set(f"data.{side}_pixels", pixels, f"image_{side}_pixels")
    video_keys = {target: p(f"video_{source}") for target, source in model_and_data.VIDEO_KEYS.items()}
    model_and_data.set_video(
        draft,
        model_and_data.video_family(draft, draft.text("model.model_name_or_path")),
        "sft",
        video_keys,
        model_and_data.VIDEO_DEFAULTS,
    )
    if (workers := draft.integer("data.dataloader_param.num_workers")) is not None:
        draft.set("data.workers", workers, "data.dataloader_param.num_workers")


def _translate_thinking(draft: Draft, u: PrefixedDraft) -> None:
    """Translate `enable_thinking`, which is not a variable of the chat template but controls reasoning in the rows:
    false removes it from the answers; true puts loss on the empty block that is added to an answer. Templates without
    reasoning ignore it."""
    key, template = u("enable_thinking"), u.text("template")
    if template is None:
        model_and_data.set_template_flags(draft, key)
        return
    if template not in _REASONING:
        draft.mark_ignored(key, why=f"template {template} has no reasoning and ignores this key")
    elif u.flag("enable_thinking") is False:
        why = "MindSpeed-MM removes reasoning from answers; Octavo keeps it without loss"
        draft.set("data.mask_reasoning", True, key, why=why)
    elif key not in draft.source_keys or u.has("enable_thinking"):
        draft.set("data.mask_empty_think", False, key, why="in MindSpeed-MM an empty thinking block has loss")
    else:
        draft.mark_default(key, why="an empty thinking block has no loss (data.mask_empty_think)")
