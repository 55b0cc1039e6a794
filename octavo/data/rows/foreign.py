"""What rows of other frameworks say that rows here do not: refused by name, with what to write instead.

Keys that choose what is learned (ms-swift, Axolotl, LLaMA-Factory, verl, torchtune, NeMo), boxes that replace
placeholders (ms-swift), and turns or parts that were written as JSON text to fit into one column. Passed over in
silence each would train on something else. A key that says what holds here anyway, such as `loss_mask: 1` of an
assistant's turn, does no harm and is not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from octavo.base.safe_read import Unreadable, parse_json
from octavo.data.errors import RowProblem, shown

CONTEXT = 'an assistant\'s turn that is not learned has "weight": 0'
PLACEHOLDERS = {"<ref-object>": "</ref-object>", "<bbox>": "</bbox>"}  # and what shows that a text has them as a tag
_TURN_LISTS = ("messages", "conversations", "conversation")
_PART_TYPES = ("text", "image", "image_url", "audio", "video", "video_url", "input_text", "input_image")


def _flag(value: Any) -> bool | None:
    """A flag or 0 and 1; None for another value."""
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def _opposite(value: Any) -> bool | None:
    flag = _flag(value)
    return None if flag is None else not flag


#: keys of turns -> whether a value says that the turn is learned (None: it says something else)
_LEARNED: dict[str, Callable[[Any], bool | None]] = {
    **dict.fromkeys(("loss_mask", "loss_scale", "loss_weight", "training", "trainable"), _flag),
    "masked": _opposite,
    **dict.fromkeys(("mask", "train_detail", "training_detail"), lambda value: None),
}
_OF_ROW = ("loss_mask", "loss_scale", "loss_weight", "train_detail", "training_detail", "masked")


def check_turn(turn: dict[str, Any], number: int, role: str) -> None:
    """That no key of another framework says otherwise than `role` what of a turn is learned. Raises `RowProblem`."""
    for key, says in _LEARNED.items():
        value = turn.get(key)
        if value in (None, "", []) or says(value) == (role == "assistant"):
            continue
        if role == "assistant":
            part = " and parts of a turn cannot be chosen" if isinstance(value, list) else ""
            fix = f"{CONTEXT},{part or ' all others are learned'}"
        else:
            fix = "only turns of an assistant are learned"
        raise RowProblem(f"turn {number}, of the {role}, has the {key} {shown(value)}, which is not read: {fix}")
    if role != "assistant" and turn.get("train") in (1, True):
        raise RowProblem(
            f"turn {number}, of the {role}, has the train {shown(turn['train'])}, and only turns of an assistant are "
            "learned (data.train_on_prompt: true learns all turns)"
        )


def check_part(part: Any, number: int, role: str) -> None:
    """That a part of text does not say, by a key of its own, whether it is learned (Axolotl): parts of a turn cannot be
    chosen. Raises `RowProblem`."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return
    for key in (*_LEARNED, "train", *(("weight", "loss") if role == "assistant" else ())):
        value = part.get(key)
        if value not in (None, "", []) and _LEARNED.get(key, _flag)(value) != (role == "assistant"):
            raise RowProblem(
                f"turn {number}, of the {role}, has a part with the {key} {shown(value)}, which is not read: "
                f"{CONTEXT}, and parts of a turn cannot be chosen"
            )


def check_variables(raw: Any) -> None:
    """That a row has no variables of its own for the chat template, as TRL reads them. Raises `RowProblem`."""
    given = raw.get("chat_template_kwargs") if isinstance(raw, dict) else None
    if given in (None, "", "{}") or (isinstance(given, dict) and all(value is None for value in given.values())):
        return
    raise RowProblem(
        f"has the chat_template_kwargs {shown(given)}, which are not read: all rows are written with the variables of "
        "data.template_args"
    )


def check_row(raw: Any) -> None:
    """That a row which is learned has no key of its own that chooses what is learned, and no boxes for placeholders.
    Raises `RowProblem`."""
    check_variables(raw)
    if not isinstance(raw, dict):
        return
    masks = [key for key in _OF_ROW if raw.get(key) not in (None, "", [])]
    if _is_mask(raw.get("mask")):
        masks.append("mask")
    if masks:
        value = shown(raw[masks[0]])
        raise RowProblem(f"has the {masks[0]} {value}, which is not read: turns of an assistant are learned; {CONTEXT}")
    objects = raw.get("objects")
    if isinstance(objects, dict) and objects.keys() & {"ref", "bbox"}:
        raise RowProblem(
            f"has objects ({', '.join(map(str, objects))}), whose boxes and names are not put into its text; write "
            "them there as the model expects them, and remove objects"
        )


def _is_mask(value: Any) -> bool:
    """Whether the `mask` of a row chooses what is learned: the role that is not, unless that is the user, or a list of
    0 and 1. It may be the name of a file too, or polygons."""
    if isinstance(value, str):
        return value.strip().lower() in ("assistant", "gpt", "model", "bot", "system", "none")
    return isinstance(value, list) and bool(value) and all(_flag(one) is not None for one in value)


def check_texts(texts: Iterable[str]) -> None:
    """That no text has a placeholder that other frameworks replace by a box or a name. Raises `RowProblem`."""
    whole = "\n".join(texts)
    for mark, closing in PLACEHOLDERS.items():
        if mark in whole and closing not in whole:
            raise RowProblem(
                f"writes {mark} in its text, a placeholder that is not replaced here; write the boxes and names "
                "themselves, as the model expects them"
            )


def check_part_text(text: str, where: str) -> None:
    """That the text of a turn is not its list of parts written as JSON. Raises `RowProblem`."""
    if _is_json(text, lambda one: one.get("type") in _PART_TYPES and len(one) > 1):
        raise RowProblem(
            f"{where} is a list of parts written as JSON text ({shown(text)}); write the list itself (a Json() column "
            "of datasets is read as such). If the text is meant, write it as one part of type text"
        )


def check_turn_text(text: str) -> None:
    """That a text which one turn says is not a list of turns written as JSON. Raises `RowProblem`."""
    if _is_json(text, lambda one: {"role", "content"} <= one.keys() or {"from", "value"} <= one.keys()):
        raise RowProblem(
            f"has turns written as JSON text ({shown(text)}); write the list itself (a Json() column of datasets is "
            "read as such). If the text is meant, write it as the content of one turn"
        )


def _is_json(text: str, entry: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether a text is a JSON list of objects that are all an `entry`."""
    head = text[:64].lstrip()
    if not head.startswith("[") or not head[1:].lstrip().startswith("{"):
        return False
    try:
        value = parse_json(text, "the text", Unreadable, list)
    except Unreadable:
        return False
    return all(isinstance(one, dict) and entry(one) for one in value)


def with_turns(raw: dict[str, Any]) -> dict[str, Any]:
    """A row whose turns, where they are JSON text, are the list that it says: CSV has no other way to hold one."""
    texts = {key: raw[key] for key in _TURN_LISTS if isinstance(raw.get(key), str) and raw[key].lstrip()[:1] == "["}
    for key, text in texts.items():
        try:
            raw = {**raw, key: parse_json(text, key, Unreadable, list)}
        except Unreadable:  # what it is instead is reported where turns are read
            continue
    return raw
