"""Prompts and completions as bytes: NumPy's file format for arrays, in which nothing is executed when it is read."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.data.encoding.sample import Input
from octavo.generation.request import Completion, Prompt

_ABOUT = "about"
_PROMPT_ARRAYS = ("input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids")
_COMPLETION_ARRAYS = ("tokens", "logps", "entropy")


def encode_prompts(prompts: Sequence[Prompt]) -> bytes:
    """Return prompts as bytes for :func:`decode_prompts`."""
    arrays, about = dict[str, np.ndarray](), []
    for index, prompt in enumerate(prompts):
        arrays |= {f"{index}.{name}": value for name in _PROMPT_ARRAYS if (value := getattr(prompt, name)) is not None}
        arrays |= {f"{index}.more.{name}": entry.values for name, entry in prompt.more.items()}
        counted = {name: entry.per for name, entry in prompt.more.items()}
        about.append({"number": prompt.number, "images": prompt.images, "name": prompt.name, "more": counted})
    return _pack(arrays, about)


def decode_prompts(data: bytes) -> list[Prompt]:
    """Return the prompts of :func:`encode_prompts`."""
    arrays, about = _unpack(data)
    return [
        Prompt(
            number=entry["number"],
            images=entry["images"],
            name=entry["name"],
            more={name: Input(per, arrays[f"{index}.more.{name}"]) for name, per in entry["more"].items()},
            **{name: arrays[key] for name in _PROMPT_ARRAYS if (key := f"{index}.{name}") in arrays},
        )
        for index, entry in enumerate(about)
    ]


def encode_completions(completions: Iterable[Completion]) -> bytes:
    """Return completions as bytes for :func:`decode_completions`."""
    arrays, about = dict[str, np.ndarray](), []
    for index, completion in enumerate(completions):
        arrays |= {f"{index}.{name}": getattr(completion, name) for name in _COMPLETION_ARRAYS}
        about.append({"prompt": completion.prompt, "sample": completion.sample, "reason": completion.reason})
    return _pack(arrays, about)


def decode_completions(data: bytes) -> list[Completion]:
    """Return the completions of :func:`encode_completions`."""
    arrays, about = _unpack(data)
    completions = []
    for index, entry in enumerate(about):
        tokens, logps, entropy = (arrays[f"{index}.{name}"] for name in _COMPLETION_ARRAYS)
        completions.append(Completion(entry["prompt"], entry["sample"], tokens, logps, entropy, entry["reason"]))
    return completions


def _pack(arrays: dict[str, np.ndarray], about: object) -> bytes:
    file = io.BytesIO()
    arrays = {_ABOUT: np.frombuffer(json.dumps(about).encode(), dtype=np.uint8), **arrays}
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def _unpack(data: bytes) -> tuple[dict[str, np.ndarray], list[dict]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(arrays.pop(_ABOUT).tobytes())
