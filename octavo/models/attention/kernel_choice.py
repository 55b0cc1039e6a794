"""Chooses an attention kernel by measurement: the fastest at a model's shapes among those that are right.

A kernel is right if its output and its three gradients have at most twice the error of the plain computation in 16 bits
(scores and weights rounded, softmax in fp32), both against fp32. The errors are compared over
:data:`COMPARED` tokens, because the reference keeps the scores of all pairs of tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.base import accelerator
from octavo.models.attention.attention import STOCK, attend, available_kernels
from octavo.models.errors import ModelError

KEEPS_WEIGHTS = ("math", "eager")  # keep the attention weights of all pairs of tokens for backward
COMPONENTS = {"language model": "foundation", "vision tower": "image_encoder"}
COMPARED = 1024
TOLERANCE = 2.0  # times the error of the plain computation
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


Call = Callable[[], Any]
Timer = Callable[[Mapping[str, Call], torch.device], Mapping[str, Any]]
"""``(calls, device)`` -> times by name, with seconds as `device` (:func:`octavo.fp8.measuring.time_calls`)."""


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


def choose(word: str, parts: tuple[Heads, ...], device: torch.device, timer: Timer) -> Choice | None:
    """Choose the kernel for all parts of a model. Returns None if torch chooses at each call (`sdpa`).

    Raises ModelError with the reason if the requested kernel does not work.
    """
    if word == STOCK:
        return None
    if word == "eager":
        return Choice(word, "as requested")
    rejected: dict[str, str] = {}
    calls: dict[str, list[Call]] = {}
    for name in available_kernels() if word == "auto" else (word,):
        try:
            calls[name] = [_try_kernel(name, part, device) for part in parts]
            if word == "auto" and accelerator.is_gpu(device):  # elsewhere nothing is timed, and the first is taken
                for part in parts:
                    check_kernel(name, part, device)
        except Exception as error:  # whatever the error, the kernel does not work here
            calls.pop(name, None)
            rejected[name] = str(error)
    if not calls:
        why = "; ".join(f"{name}: {why}" for name, why in rejected.items())
        raise ModelError(f"model.attention: {word} cannot run on {device}: {why}. Use auto or sdpa")
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


def make_call(name: str, part: Heads, device: torch.device) -> Call:
    """Return a function that runs forward and backward of a part with a kernel; ``sdpa``: as torch chooses."""
    gpu = accelerator.is_gpu(device)
    tokens = part.tokens if gpu else min(part.tokens, 64)  # other devices are not timed
    q, k, v, dy = _random_inputs(part, tokens, torch.bfloat16 if gpu else torch.float32, device)

    def call() -> None:
        torch.autograd.grad(attend(name, q, k, v, part.causal), (q, k, v), dy)

    return call


def _random_inputs(part: Heads, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return q, k, v with gradients and dy, [1, heads, tokens, size], as views of rows of tokens."""

    def random(heads: int) -> Tensor:
        x = torch.randn(1, tokens, heads, part.size, device=device, dtype=dtype)
        return x.transpose(1, 2).requires_grad_()

    return random(part.heads), random(part.kv), random(part.kv), random(part.heads).detach()


def _try_kernel(name: str, part: Heads, device: torch.device) -> Call:
    """Run forward and backward of a part once with a kernel, and return a function that repeats the call. Raises
    RuntimeError with the reason if it does not work."""
    call = make_call(name, part, device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            lines = [str(w.message).split(" (Triggered")[0].strip() for w in caught]
            reason = "; ".join(line for line in lines if line) or str(error).partition("\n")[0].partition(". ")[0]
            raise RuntimeError(f"{part}: {reason}") from error
    return call


def check_kernel(name: str, part: Heads, device: torch.device) -> None:
    """Compare a kernel in BF16 with the plain computation (see the module docstring). Raises RuntimeError if an error
    is above the tolerance."""
    q, k, v, dy = _random_inputs(part, min(part.tokens, COMPARED), torch.bfloat16, device)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    exact = _outputs(_plain(wide[0], wide[1], wide[2], part.causal), wide, dy.float())
    plain = _outputs(_plain(q, k, v, part.causal), [q, k, v], dy)
    results = _outputs(attend(name, q, k, v, part.causal), [q, k, v], dy)
    for what, reference, rounded, value in zip(("y", "dq", "dk", "dv"), exact, plain, results, strict=True):
        limit = TOLERANCE * float((rounded.float() - reference).norm())
        error = float((value.float() - reference).norm())
        if not error <= limit:  # NaN is an error too
            scale = float(reference.norm())
            raise RuntimeError(
                f"{part}: its error of {what} is {error / scale:.2g} of the values, more than {TOLERANCE:g} times the "
                f"plain computation's ({limit / TOLERANCE / scale:.2g})"
            )


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute attention of q [1, H, T, D] as eager code does: scores and weights rounded to the dtype of q."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def _outputs(y: Tensor, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the inputs."""
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]
