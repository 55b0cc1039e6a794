"""Rejects row features of other frameworks that Octavo does not support, and names the supported alternative.

They are keys that select what is learned (ms-swift, Axolotl, LLaMA-Factory, verl, torchtune, NeMo), boxes that replace
placeholders (ms-swift), and turns or parts that were written as JSON text to fit into one column. Ignoring any of them
would change the training data. A key that agrees with the default, such as `loss_mask: 1` in an assistant's turn, is
harmless and accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from octavo.base.safe_read import Unreadable, parse_json
from octavo.data.errors import RowProblem, quote_value

CONTEXT = 'an assistant\'s turn that is not learned has "weight": 0'
PLACEHOLDERS = {"<ref-object>": "</ref-object>", "<bbox>": "</bbox>"}  # with a closing tag they are no placeholders
_TURN_LISTS = ("messages", "conversations", "conversation")
_PART_TYPES = ("text", "image", "image_url", "audio", "video", "video_url", "input_text", "input_image")


def _parse_flag(value: object) -> bool | None:
    """Return a bool, or 0 or 1 as a bool; None for any other value."""
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def _inverted_flag(value: object) -> bool | None:
    flag = _parse_flag(value)
    return None if flag is None else not flag


#: keys of turns -> whether a value means that the turn is learned, or None for other meanings
_LEARNED: dict[str, Callable[[object], bool | None]] = {
    **dict.fromkeys(("loss_mask", "loss_scale", "loss_weight", "training", "trainable"), _parse_flag),
    "masked": _inverted_flag,
    **dict.fromkeys(("mask", "train_detail", "training_detail"), lambda value: None),
}
_ROW_KEYS = ("loss_mask", "loss_scale", "loss_weight", "train_detail", "training_detail", "masked")


def check_turn(turn: dict[str, Any], number: int, role: str) -> None:
    """Check that no key of another framework contradicts the rule that assistant turns are learned. Raises
    `RowProblem`."""
    for key, parse in _LEARNED.items():
        value = turn.get(key)
        if value in (None, "", []) or parse(value) == (role == "assistant"):
            continue
        if role == "assistant":
            hint = " and parts of a turn cannot be chosen" if isinstance(value, list) else ""
            fix = f"{CONTEXT},{hint or ' all others are learned'}"
        else:
            fix = "only turns of an assistant are learned"
        raise RowProblem(
            f"turn {number}, of the {role}, has the {key} {quote_value(value)}, which is not supported: {fix}"
        )
    if role != "assistant" and turn.get("train") in (1, True):
        raise RowProblem(
            f"turn {number}, of the {role}, has the train {quote_value(turn['train'])}, and only turns of an assistant "
            "are learned (data.train_on_prompt: true learns all turns)"
        )


def check_part(part: object, number: int, role: str) -> None:
    """Check that no text part has a key that chooses whether it is learned (Axolotl), which works only for whole turns
    here. Raises `RowProblem`."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return
    for key in (*_LEARNED, "train", *(("weight", "loss") if role == "assistant" else ())):
        value = part.get(key)
        if value not in (None, "", []) and _LEARNED.get(key, _parse_flag)(value) != (role == "assistant"):
            raise RowProblem(
                f"turn {number}, of the {role}, has a part with the {key} {quote_value(value)}, which is not "
                f"supported: {CONTEXT}, and parts of a turn cannot be chosen"
            )


def check_variables(raw: object) -> None:
    """Check that a row has no variables for the chat template, as TRL supports. Raises `RowProblem`."""
    kwargs = raw.get("chat_template_kwargs") if isinstance(raw, dict) else None
    if kwargs in (None, "", "{}") or (isinstance(kwargs, dict) and all(value is None for value in kwargs.values())):
        return
    raise RowProblem(
        f"has the chat_template_kwargs {quote_value(kwargs)}, which is not supported: all rows are rendered with the "
        "variables of data.template_args"
    )


def check_row(raw: object) -> None:
    """Check that a row has no variables, no key that chooses what is learned, and no boxes for placeholders. Raises
    `RowProblem`."""
    check_variables(raw)
    if not isinstance(raw, dict):
        return
    masks = [key for key in _ROW_KEYS if raw.get(key) not in (None, "", [])]
    if _is_mask(raw.get("mask")):
        masks.append("mask")
    if masks:
        value = quote_value(raw[masks[0]])
        raise RowProblem(f"has the {masks[0]} {value}, which is not supported: assistant turns are learned; {CONTEXT}")
    objects = raw.get("objects")
    if isinstance(objects, dict) and objects.keys() & {"ref", "bbox"}:
        raise RowProblem(
            f"has objects ({', '.join(map(str, objects))}), whose boxes and names are not inserted into its text; "
            "write them there as the model expects them, and remove objects"
        )


def _is_mask(value: object) -> bool:
    """Return True if the key `mask` of a row chooses what is learned: it names a role other than the user that is not
    learned, or is a list of 0 and 1. It may also be a file name, or polygons."""
    if isinstance(value, str):
        return value.strip().lower() in ("assistant", "gpt", "model", "bot", "system", "none")
    return isinstance(value, list) and bool(value) and all(_parse_flag(entry) is not None for entry in value)


def check_texts(texts: Iterable[str]) -> None:
    """Check that no text has a placeholder that other frameworks replace by a box or a name. Raises `RowProblem`."""
    whole = "\n".join(texts)
    for mark, closing in PLACEHOLDERS.items():
        if mark in whole and closing not in whole:
            raise RowProblem(
                f"writes {mark} in its text, a placeholder that is not replaced here; write the boxes and names "
                "themselves, as the model expects them"
            )


def check_part_text(text: str, where: str) -> None:
    """Check that the text of a turn is not a list of parts written as JSON. Raises `RowProblem`."""
    if _is_json_list(text, lambda entry: entry.get("type") in _PART_TYPES and len(entry) > 1):
        raise RowProblem(
            f"{where} is a list of parts written as JSON text ({quote_value(text)}); write the list itself (a Json() "
            "column of datasets is read as such). If the text is intended, write it as one part of type text"
        )


def check_turn_text(text: str) -> None:
    """Check that the text of one turn is not a list of turns written as JSON. Raises `RowProblem`."""
    if _is_json_list(text, lambda entry: {"role", "content"} <= entry.keys() or {"from", "value"} <= entry.keys()):
        raise RowProblem(
            f"has turns written as JSON text ({quote_value(text)}); write the list itself (a Json() column of datasets "
            "is read as such). If the text is intended, write it as the content of one turn"
        )


def _is_json_list(text: str, matches: Callable[[dict[str, Any]], bool]) -> bool:
    """Return True if a text is a JSON list of objects for which `matches` is true."""
    head = text[:64].lstrip()
    if not head.startswith("[") or not head[1:].lstrip().startswith("{"):
        return False
    try:
        value = parse_json(text, "the text", Unreadable, list)
    except Unreadable:
        return False
    return all(isinstance(entry, dict) and matches(entry) for entry in value)


def parse_turn_lists(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose turns, if they are JSON text, are parsed to a list: CSV has no other way to hold a list."""
    texts = {key: raw[key] for key in _TURN_LISTS if isinstance(raw.get(key), str) and raw[key].lstrip()[:1] == "["}
    for key, text in texts.items():
        try:
            raw = {**raw, key: parse_json(text, key, Unreadable, list)}
        except Unreadable:  # the error is reported where turns are read
            continue
    return raw
