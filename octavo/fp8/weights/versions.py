"""The weight version, which shows whether weights may have changed since something was derived from them.

``now`` rises at every step of every ``torch.optim`` optimizer of the process (a process-wide post-step hook);
``edits`` at every announced write that no step and no version counter shows.

The caller that is about to write is read from the call stack, only for errors: torch gives a tensor no other way to
know that a module converts it, and PEFT is not imported here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

now = 0
"""Incremented by every optimizer step of the process. Read it as ``versions.now``."""
edits = 0
"""Incremented by every write that was reported explicitly."""
_installed = False
_lock = threading.Lock()
# Callbacks that drop what is cached between two layers, at an optimizer step and on notify().
_listeners: list[Callable[[], None]] = []


def listen(drop: Callable[[], None]) -> None:
    """Call ``drop`` after every optimizer step and at every :func:`notify`."""
    _listeners.append(drop)


def notify() -> None:
    """Call all registered callbacks."""
    for drop in _listeners:
        drop()


def record_edit() -> None:
    """Record that weights were written by something other than an optimizer."""
    global edits
    edits += 1


def watch_optimizers() -> None:
    """Make every ``torch.optim`` step raise the weight version; installed once per process, on first use."""
    global _installed
    with _lock:
        if not _installed:
            register_optimizer_step_post_hook(_on_optimizer_step)
            _installed = True


def _on_optimizer_step(*_: object) -> None:
    global now
    now += 1
    notify()


def _caller_frames(most: int = sys.maxsize) -> Iterator[FrameType]:
    """Yield at most ``most`` frames of the call stack, from the caller's caller outward."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and most:
        yield frame
        frame, most = frame.f_back, most - 1


def called_by_conversion() -> bool:
    """Return True if a module's ``_apply`` (``module.to()``, ``half()``, ``float()``) is converting a weight and will
    store the result as its parameter. The frames between are the tensor's method and the module's function."""
    frames = _caller_frames(most=8)
    return any(f.f_code.co_name == "_apply" and isinstance(f.f_locals.get("self"), nn.Module) for f in frames)


def peft_advice() -> str:
    """Return advice for an error if PEFT is writing to a weight, as a sentence and a space; "" for other callers."""
    # PEFT is recognized by the names of its frames: importing it takes seconds, and it may not be installed.
    peft_frames = [
        frame for frame in _caller_frames() if str(frame.f_globals.get("__name__")).partition(".")[0] == "peft"
    ]
    for frame in peft_frames:
        name, adapter = frame.f_code.co_name, frame.f_locals.get("adapter_name")
        if name.endswith("_init"):
            return (
                f"PEFT's start {name.removesuffix('_init')!r} of adapter {adapter!r} takes its part out of the base: "
                "choose another init_lora_weights (True, 'gaussian', 'eva', 'orthogonal'). "
            )
        if "merge" in name:
            return (
                "PEFT's merge adds the adapter to the base: save_pretrained the adapter, and `octavo merge` adds it to "
                "the stock checkpoint. "
            )
        if name == "prepare_model_for_kbit_training":
            return "PEFT's preparation for bitsandbytes casts weights to fp32: leave it out over a base in FP8. "
        if type(frame.f_locals.get("self")).__name__ == "ModulesToSaveWrapper":
            return "PEFT's modules_to_save trains a copy of this layer: leave the layer out of it. "
    if peft_frames:
        kind = peft_frames[0].f_globals["__name__"]
        return (
            f"PEFT's {kind} writes to the base: choose an adapter that is added to its output, such as LoRA or DoRA. "
        )
    return ""
