"""What all frameworks name in some way: the model, adapters, what is frozen, packing, and FP8 where there was none."""

from __future__ import annotations

import re
from typing import Any

from octavo import reading
from octavo.hub import is_name
from octavo.translate.draft import Draft, globs

_SEES = re.compile(
    r"(vl\b|[-_]vl[-_.\d]|vision|llava|vila|internvl|pixtral|smolvlm|idefics|mllama|gemma-3-(4|12|27)b|minicpm-v|"
    r"glm-4\.[0-9]+v|qvq|omni)",
    re.IGNORECASE,
)
#: what training freezes by component, in Octavo's order
COMPONENTS = ("image_encoder", "image_projector", "foundation")


def model(draft: Draft, *keys: str, why: str = "") -> str | None:
    """The first of these keys that is there becomes model.path; a file without one is left to be filled in."""
    for key in keys:
        if word := draft.text(key):
            draft.put("model.path", draft.path(word), key, why=why)
            return word
    draft.put("model.path", "/path/to/model", why="to be filled in: no key named a model")
    draft.note("model.path is to be filled in: a folder of Hugging Face, or a name of the hub")
    return None


def config_of(draft: Draft, path: str | None) -> dict[str, Any]:
    """config.json of a model's folder, where it lies here."""
    if path is None or is_name(path, draft.root):
        return {}
    file = draft.root / path / "config.json"
    return reading.read_json(file) if file.is_file() else {}


def sees(draft: Draft, path: str | None) -> bool:
    """Whether a model has a vision tower: its config.json says so where it lies here; elsewhere its name is judged,
    which is noted."""
    if path is None:
        return False
    config = config_of(draft, path)
    if config:
        return any(key in config for key in ("vision_config", "vision_tower_cfg", "mm_vision_tower"))
    found = _SEES.search(path) is not None
    draft.note(f"{path} is not here, so by its name it {'sees images' if found else 'is a text model'}")
    return found


def lora(
    draft: Draft, rank: int, alpha: float, dropout: float, targets: list[str], *, keys: dict[str, str], seeing: bool
) -> None:
    """Adapters: ``targets`` are components, or names of modules, which mean those of the language model where a tower
    has modules of such a name too."""
    draft.put("lora.rank", rank, keys.get("rank", ""))
    draft.put("lora.alpha", float(alpha), keys.get("alpha", ""))
    draft.put("lora.dropout", float(dropout), keys.get("dropout", ""))
    named = [word for word in targets if word not in COMPONENTS]
    found = [word for word in targets if word in COMPONENTS] + globs(named)
    draft.put("lora.targets", found, keys.get("targets", ""))
    if named and seeing:
        draft.put("lora.exclude", ["image_encoder"], why="its modules may bear the same names")


def freeze(draft: Draft, frozen: dict[str, tuple[str, ...]]) -> None:
    """component -> the keys that freeze it."""
    names = [name for name in COMPONENTS if name in frozen]
    if names:
        keys = [key for name in names for key in frozen[name]]
        draft.put("model.freeze", names, *keys)


def adapt(draft: Draft, keys: dict[str, str], rslora: str = "", dora: str = "") -> None:
    """rsLoRA and DoRA."""
    if rslora and draft.flag(rslora):
        draft.put("lora.rslora", True, rslora)
    if dora and draft.flag(dora):
        draft.put("lora.dora", True, dora)


def packing(draft: Draft, *keys: str, why: str = "") -> None:
    draft.put("data.packing", True, *keys, why=why or "samples of a row never see each other")


def packs(draft: Draft, phase: str, key: str) -> bool:
    """Whether rows are packed, which one flag says there; what it means in each phase."""
    on = draft.flag(key)
    if phase == "sft" and on:
        packing(draft, key)
        return True
    if phase == "pretrain":
        draft.same(key, why="documents are joined and cut to seq_length (data.join)")
    elif on:
        draft.none(key, why="pairs are rows of one batch")
    else:
        draft.same(key, why="a row is a sample")
    return False


def no_fp8(draft: Draft) -> None:
    """Where nothing asked for FP8, the run stays in high precision, so that it is the run it was."""
    if not any(target.startswith(("fp8.", "model.load_in_fp8")) for target in draft.settings):
        draft.put("fp8.recipe", "off", why="no FP8 there; blockwise is Octavo's usual")
        draft.note(
            "there was no FP8: fp8.recipe is off; remove that line (or give --fp8-recipe blockwise) to train in FP8"
        )


def eight_bits(draft: Draft, key: str, bits: int) -> None:
    """A base in 8 bits becomes FP8 codes; one in 4 has no equivalent, and the codes are what comes nearest."""
    if bits == 8:
        draft.put(
            "model.load_in_fp8", "rowwise", key, why="8 bits that are multiplied in FP8, with a scale for each row"
        )
    else:
        why = "there is no 4-bit base; model.load_in_fp8 keeps it at a byte a parameter, twice QLoRA's"
        draft.none(key, why=why)
        draft.put("model.load_in_fp8", "rowwise", why=f"in the place of {bits} bits, which Octavo lacks")


def dataset(draft: Draft, of: str, number: int, path: str, *keys: str, hub: bool = True, why: str = "") -> str:
    """A data set's path; gives the prefix of its further keys."""
    at = f"data.{of}.{number}"
    draft.put(f"{at}.path", draft.path(path, hub=hub), *keys, why=why)
    return at


def thinking(draft: Draft, key: str) -> None:
    """`enable_thinking` is a variable of the chat template, and one that a template does not read is an error here; so
    the template is looked at where the model's folder is here."""
    found = draft.flag(key)
    if found is None:
        return
    source = draft.settings["model.path"].source
    folder = draft.root / str(source[0].value) if source else draft.root / "nowhere"
    files = [folder / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")]
    texts = [reading.read_text(file) for file in files if file.is_file()]
    if texts and not any("enable_thinking" in text for text in texts):
        draft.dead(key, why="the chat template of this model reads no such variable")
        return
    draft.put("data.template_args", {"enable_thinking": found}, key, why="a variable of the chat template")
    if not texts:
        draft.note("data.template_args: remove enable_thinking if the model's chat template does not read it")


TEMPLATE = "the chat template is that of the model's folder; a template of another name there has no equivalent"
VIDEO = "videos are refused, by row"
