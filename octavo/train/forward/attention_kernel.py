"""Selects the attention kernel (`model.attention`): the named one, or the fastest that works on this device.

`auto` runs every kernel forward and backward on the shapes of the model's parts (heads, groups, head size, causal or
not, rows of `train.seq_length`), and on a GPU takes the one with the smallest total time. On other devices nothing is
timed, and the first that works is taken. A call that the kernel does not support, such as rows of unequal length with a
mask, falls back to the next one that does, as in torch's own choice. A resumed run keeps its kernel.

Vision tower and language model may have different kernels (`{image_encoder: varlen, foundation: cudnn}`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from octavo import models
from octavo.base import accelerator
from octavo.config import Config
from octavo.fp8 import measuring
from octavo.parallel import World
from octavo.train.errors import TrainError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STOCK = "sdpa"
KEEPS_WEIGHTS = ("math", "eager")  # keep the attention weights of all pairs of tokens for backward
COMPONENTS = {"language model": "foundation", "vision tower": "image_encoder"}
_TIMED_PATCHES = 1024  # patches of the image for timing a vision tower: 512 x 512 pixels in patches of 16


@dataclass(frozen=True)
class Heads:
    """The attention of one part of a model: ``heads`` query heads and ``kv`` key-value heads of ``size`` features."""

    part: str  # a key of :data:`COMPONENTS`
    heads: int
    kv: int
    size: int
    tokens: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.part}, {self.heads} heads of {self.size} over {self.kv}{', causal' if self.causal else ''}"


@dataclass(frozen=True)
class Choice:
    """The chosen ``kernel`` of a ``component`` (of all components if None), with the reason for the choice and the
    reasons why other kernels were ``rejected``."""

    kernel: str
    why: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    component: str | None = None

    def __str__(self) -> str:
        left = "".join(f"; not {name}: {why}" for name, why in self.rejected.items())
        memory = ". It keeps T x T weights for backward, which predicted memory does not include"
        of = "" if self.component is None else f" of {self.component}"
        return f"attention{of} by {self.kernel}, {self.why}{left}{memory if self.kernel in KEEPS_WEIGHTS else ''}"


def heads_of(config: Any, tokens: int) -> tuple[Heads, ...]:
    """Return the attention of each part of a model, from its configuration, for rows of ``tokens`` tokens."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    count = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // count
    parts = [Heads("language model", count, getattr(text, "num_key_value_heads", None) or count, size, tokens, True)]
    if vision is not None:
        width = getattr(vision, "embed_dim", None) or vision.hidden_size
        count = getattr(vision, "num_heads", None) or vision.num_attention_heads
        parts.append(Heads("vision tower", count, count, width // count, _TIMED_PATCHES, False))
    return tuple(parts)


Timer = Callable[..., Mapping[str, Any]]


def choose(
    word: str, parts: tuple[Heads, ...], device: torch.device, timer: Timer = measuring.time_calls
) -> Choice | None:
    """Choose the kernel for all parts of a model. Returns None if torch chooses at each call (`sdpa`).

    Raises TrainError with the reason if the requested kernel does not work.
    """
    if word == STOCK:
        return None
    if word == "eager":
        return Choice(word, "as requested")
    rejected: dict[str, str] = {}
    calls: dict[str, list[Callable[[], Any]]] = {}
    for name in models.available_kernels() if word == "auto" else (word,):
        try:
            calls[name] = [_try_kernel(name, part, device) for part in parts]
        except Exception as error:  # whatever the error, the kernel does not work here
            rejected[name] = str(error)
    if not calls:
        why = "; ".join(f"{name}: {why}" for name, why in rejected.items())
        raise TrainError(f"model.attention: {word} cannot run on {device}: {why}. Use auto or sdpa")
    if word != "auto":
        return Choice(word, "as requested")
    if not accelerator.is_gpu(device):
        first = next(iter(calls))
        rejected |= {name: "a later choice" for name in calls if name != first}
        return Choice(first, f"the first that works on this {device.type}, where nothing is timed", rejected)
    times = dict.fromkeys(calls, 0.0)
    for index in range(len(parts)):
        measured = timer({name: each[index] for name, each in calls.items()}, device)
        times = {name: seconds + measured[name].device for name, seconds in times.items()}
    best = min(times, key=lambda name: times[name])
    rejected |= {name: f"{1e3 * seconds:.3f} ms" for name, seconds in times.items() if name != best}
    return Choice(best, f"the fastest here ({1e3 * times[best]:.3f} ms forward and backward)", rejected)


def _try_kernel(name: str, part: Heads, device: torch.device) -> Callable[[], Any]:
    """Run forward and backward of a part once with a kernel, and return a function that repeats the call. Raises
    RuntimeError with the reason if it does not work."""
    gpu = accelerator.is_gpu(device)
    tokens = part.tokens if gpu else min(part.tokens, 64)  # other devices are not timed

    def random(heads: int) -> torch.Tensor:
        dtype = torch.bfloat16 if gpu else torch.float32
        x = torch.randn(1, tokens, heads, part.size, device=device, dtype=dtype)
        return x.transpose(1, 2).requires_grad_()

    q, k, v, dy = random(part.heads), random(part.kv), random(part.kv), random(part.heads).detach()

    def call() -> None:
        y = models.attend(name, q, k, v, part.causal)
        torch.autograd.grad(y, (q, k, v), dy)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            lines = [str(w.message).split(" (Triggered")[0].strip() for w in caught]
            reason = "; ".join(line for line in lines if line) or str(error).partition("\n")[0].partition(". ")[0]
            raise RuntimeError(f"{part}: {reason}") from error
    return call


def requested_kernels(cfg: Config, parts: tuple[Heads, ...]) -> dict[str | None, tuple[str, tuple[Heads, ...]]]:
    """Return the value of `model.attention` and the parts of each component; the key None stands for all components.
    Raises TrainError for a component that the model does not have."""
    words = cfg.model.attention.kernels
    by_component = {COMPONENTS[part.part]: part for part in parts}
    if len(set(words.values())) == 1:
        return {None: (words["foundation"], parts)}
    if "image_encoder" not in by_component:
        if words["image_encoder"] == STOCK:  # the default
            return {None: (words["foundation"], parts)}
        raise TrainError(
            f"model.attention.image_encoder: {words['image_encoder']}, but this model has no image_encoder. Use "
            f"model.attention: {words['foundation']}"
        )
    return {component: (words[component], (part,)) for component, part in by_component.items()}


def choices(cfg: Config, parts: tuple[Heads, ...], device: torch.device) -> list[Choice]:
    """Choose the kernel of each component. Returns an empty list if torch chooses at each call. Raises TrainError."""
    chosen = {
        component: choose(word, heads, device) for component, (word, heads) in requested_kernels(cfg, parts).items()
    }
    return [replace(choice, component=component) for component, choice in chosen.items() if choice is not None]


def decide(cfg: Config, world: World, saved: Any) -> tuple[Choice, ...]:
    """Return the choices of a run, which rank 0 makes. Collective call.

    ``saved`` is the kernel of a resumed run, or its kernels by component, or None for a new run.
    """
    words = set(cfg.model.attention.kernels.values())
    if words == {STOCK}:
        return ()
    if "auto" in words and saved is not None:
        before = saved.items() if isinstance(saved, dict) else [(None, saved)]
        return tuple(Choice(kernel, "as this run began", component=component) for component, kernel in before)

    def work() -> list[dict[str, Any]]:
        parts = heads_of(models.read_config(cfg.model.path), cfg.train.seq_length)
        return [{**asdict(choice), "rejected": dict(choice.rejected)} for choice in choices(cfg, parts, world.device)]

    return tuple(Choice(**choice) for choice in world.run_on_main(work))


def saved_choices(chosen: Sequence[Choice]) -> Any:
    """Return the value to checkpoint for :func:`decide`, or None if there are no choices."""
    if not chosen:
        return None
    one = len(chosen) == 1 and chosen[0].component is None
    return chosen[0].kernel if one else {str(choice.component): choice.kernel for choice in chosen}


def use_kernels(model: PreTrainedModel, chosen: Sequence[Choice]) -> None:
    """Set the attention kernels of a model. Raises TrainError for a model whose attention cannot be replaced."""
    for choice in chosen:
        try:
            models.use_kernel(model, choice.kernel, choice.component)
        except (models.ModelError, ImportError, ValueError) as error:
            raise TrainError(
                f"model.attention: {choice.kernel} cannot be used: {error}. Use model.attention: {STOCK}"
            ) from error
