"""The page for users of other frameworks names keys that exist, and agrees with the translations of error messages."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from octavo import fp8
from octavo.config import Config, LoraSection
from octavo.config.sections import foreign_words
from octavo.config.sections.rl import PreferenceSection, RlSection

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
BY_HAND = PAGE.split("## Words of other frameworks")[0]
SECTIONS = {name: field.annotation for name, field in Config.model_fields.items()}
SECTIONS |= {"lora": LoraSection, "rl": RlSection, "preference": PreferenceSection}  # optional sections


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_keys_in_coming_from_exist() -> None:
    """Checks `section: {key: ..., key}` and `section.key` in the Octavo column of docs/coming_from.md."""
    named = set()
    for cells in (line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")):
        for code in re.findall(r"`([^`]+)`", cells[1]):
            if keys := re.fullmatch(r"(\w+): \{(.*)\}", code):
                inner = re.sub(r"[\[{].*?[\]}]", "", keys[2])
                named |= {(keys[1], key) for key in re.findall(r"(?:^|, )(\w+)", inner)}
            elif key := re.fullmatch(r"(model|data|train|lora|optimizer|preference|rl|run|fp8)\.([a-z_]+)\b.*", code):
                named.add((key[1], key[2]))
    wrong = [f"{s}.{k}" for s, k in named if k not in SECTIONS[s].model_fields and not (s == "fp8" and hasattr(fp8, k))]
    assert len(named) > 40 and not wrong, wrong


def test_words_are_those_of_the_table() -> None:
    written = runpy.run_path(str(ROOT / "docs/site/words.py"))["page"]()
    assert written == PAGE, "run python docs/site/words.py"
    for word in (*foreign_words.KEYS, *foreign_words.COMPONENT_WORDS):
        assert f"`{word}`" in PAGE.split("## Words of other frameworks")[1]


def disagreements(text: str) -> list[str]:
    """Rows written by hand whose key of another framework has another translation in error messages."""
    wrong = []
    for there, here, *_ in rows(text):
        for word in re.findall(r"`(\w+)`", there):
            own = foreign_words.KEYS.get(word, ("", ""))[0].partition(":")[0].split(".")[-1]
            if (
                own
                and word not in foreign_words.SEVERAL_MEANINGS
                and here != "none"
                and not re.search(rf"\b{own}\b", here)
            ):
                wrong.append(f"{word}: {here}, and {own} in foreign_words.py")
    return wrong


def test_rows_by_hand_agree_with_error_messages() -> None:
    assert disagreements("| `cutoff_len` | `train.lr` | |") == [
        "cutoff_len: `train.lr`, and seq_length in foreign_words.py"
    ]
    assert not disagreements(BY_HAND)


def test_versions_of_others_are_named_once_each() -> None:
    """A claim about another library names the version that was read, in the head of the table and in the list."""
    head, listed = (line for line in BY_HAND.splitlines() if line.startswith("| what | Octavo")), PAGE
    for version in re.findall(r"(?:torchao|TransformerEngine|Unsloth|LLaMA-Factory) [\d.]+", next(head)):
        assert f"**{version}**" in listed
