"""Dummy inputs for towers: the vision tower takes part in every step, even if a batch has no image.

In data-parallel training every rank has to run the same collectives. A rank without images would skip the tower, its
all-gathers and its reduce-scatters, and the other ranks would wait forever. Gradients of an unfrozen tower that a step
never reaches would also be None instead of tensors. So the tower runs on the smallest image, and its output has no
effect: the input of the language model is unchanged, and the gradient is exactly zero. The audio tower runs on silence.

Experts for images (Ernie 4.5 VL) are in the decoder, where a layer calls them only if there is an image. Otherwise they
run on zero tokens, for the same two reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from octavo.models.errors import ModelError
from octavo.models.structure.audio_shapes import audio_of
from octavo.models.structure.describe import Family
from octavo.models.structure.vision_shapes import vision_of


class _HasImageFeatures(Protocol):
    """The module that contains the tower: a model of images and text without its output projection."""

    def get_image_features(self, **inputs: Tensor) -> object:
        """Return features of images, from tower and projector."""


class _Join(torch.autograd.Function):
    """Returns `embeds` unchanged and passes its gradient; every feature receives a gradient of zeros.

    Not `embeds + 0 * features.sum()`: zero times Inf or NaN is NaN, and adding 0.0 turns -0.0 into 0.0.
    """

    @staticmethod
    def forward(ctx: Any, embeds: Tensor, *features: Tensor) -> Tensor:
        ctx.shapes = [(f.shape, f.dtype, f.device) for f in features]
        return embeds.view_as(embeds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)
        return (grad, *zeros)


def dummy_image_inputs(model: nn.Module, family: Family) -> dict[str, Tensor]:
    """Return the smallest black image of a family, as arguments of `get_image_features`, on the tower's device."""
    if not family.has_vision:
        raise ModelError(f"{family.name} does not take images; only a vision-language model needs a dummy image.")
    parameter = next(model.get_submodule(family.tower).parameters())
    return vision_of(cast(PreTrainedConfig, model.config)).smallest(parameter.device, parameter.dtype)


def attach_dummy_image(
    model: nn.Module,
    family: Family,
    enabled: Callable[[], bool],
    guard: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> RemovableHandle:
    """Run tower and projector on a dummy image before the language model, whenever `enabled()` is true.

    enabled  called once in each forward: true for a batch without images (always true is also correct, at the cost of
             one small image)
    guard    context around the extra forward, e.g. `octavo.fp8.observe.uncounted`, so that it is not part of amax
             histories, health figures and GEMM counts

    The tower runs whether it is frozen or not. Losses and other gradients are bit-identical to a model without the
    hook; unfrozen parameters of tower and projector get gradients of exactly zero. Returns a handle; `remove()` removes
    the hook. Raises ModelError for a family without images.
    """
    owner = cast(_HasImageFeatures, model.get_submodule(family.tower.rpartition(".")[0]))
    dummy_image_inputs(model, family)  # raises for a family without images now, not in the first step

    def features() -> Iterator[Tensor]:
        return _features(owner.get_image_features(**dummy_image_inputs(model, family)))

    return _attach(model, family, "image", enabled, guard, features)


def attach_dummy_sound(
    model: nn.Module,
    family: Family,
    enabled: Callable[[], bool],
    guard: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> RemovableHandle:
    """Run the audio tower and its projector on silence, like :func:`attach_dummy_image`. The dummy sound has full
    length, because towers accept no shorter one. Raises ModelError for a family whose audio inputs Octavo does not
    know."""
    if not family.has_audio:
        raise ModelError(f"{family.name} does not take audio; only a model with an audio tower needs a dummy sound.")
    audio = audio_of(cast(PreTrainedConfig, model.config))
    tower = model.get_submodule(family.audio_tower)
    globs = family.components["audio_projector"]
    projectors = [model.get_submodule(glob.removesuffix(".**")) for glob in globs]

    def features() -> Iterator[Tensor]:
        parameter = next(tower.parameters())
        output: Tensor = tower(audio.smallest(parameter.device, parameter.dtype)).last_hidden_state
        for projector in projectors:
            output = projector(output)
        yield output

    return _attach(model, family, "sound", enabled, guard, features)


def attach_idle_experts(
    model: nn.Module, family: Family, guard: Callable[[], AbstractContextManager[object]] = nullcontext
) -> list[RemovableHandle]:
    """Run the experts for images on zero tokens in each forward whose layer does not call them; a family without such
    experts gets no hook.

    Values are unchanged, the experts' parameters get gradients of exactly zero, and experts that are distributed over
    ranks take part in every exchange. The layer itself is observed instead of the batch, because a rank that shares a
    row may have none of its image tokens.
    """
    inside = f"{family.language_model}."
    names = [name for name, _ in model.named_modules() if name.startswith(inside)]
    names = [name for name in names if family.component_of(name) == "image_projector"]
    outermost = [name for name in names if name.rpartition(".")[0] not in names]
    return [
        handle
        for name in outermost
        for handle in _IdleExperts(model.get_submodule(name), guard).attach(
            model.get_submodule(name.rpartition(".")[0])
        )
    ]


class _IdleExperts:
    """The hooks of one layer: they record whether it called its experts for images, and call them if not."""

    def __init__(self, experts: nn.Module, guard: Callable[[], AbstractContextManager[object]]) -> None:
        self.experts, self.guard, self.called = experts, guard, False

    def attach(self, layer: nn.Module) -> list[RemovableHandle]:
        """Attach the hooks to ``layer``, the module that calls the experts and returns a tuple that begins with the
        hidden states."""
        return [
            layer.register_forward_pre_hook(self._begin),
            self.experts.register_forward_hook(self._record_call),
            layer.register_forward_hook(self._end),
        ]

    def _begin(self, layer: nn.Module, args: tuple[object, ...]) -> None:
        self.called = False

    def _record_call(self, experts: nn.Module, args: tuple[object, ...], output: object) -> None:
        self.called = True

    def _end(self, layer: nn.Module, args: tuple[object, ...], output: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.called:
            return None
        hidden, *rest = output
        no_tokens = hidden.new_empty(
            0, requires_grad=torch.is_grad_enabled()
        )  # so that the backward takes part in exchanges too
        with self.guard():
            return _Join.apply(hidden, *_tensors(self.experts(no_tokens))), *rest


def _attach(
    model: nn.Module, family: Family, medium: str, enabled: Callable[[], bool],
    guard: Callable[[], AbstractContextManager[object]], features: Callable[[], Iterator[Tensor]],
) -> RemovableHandle:  # fmt: skip
    """Join `features` to the input of the language model by :class:`_Join` whenever `enabled()` is true."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if not enabled():
            return None
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            raise ModelError(
                f"the language model of {family.name} was called without inputs_embeds, so a dummy {medium} cannot be "
                "added; call the full model, not only its language model."
            )
        with guard():
            embeds = _Join.apply(embeds, *features())
        return args, {**kwargs, "inputs_embeds": embeds}

    return model.get_submodule(family.language_model).register_forward_pre_hook(hook, with_kwargs=True)


def _features(output: Any) -> Iterator[Tensor]:
    """Yield the projector's outputs that enter the language model, including DeepStack's."""
    for entry in (output.pooler_output, getattr(output, "deepstack_features", None)):
        yield from _tensors(entry)


def _tensors(entry: Any) -> Iterator[Tensor]:
    if isinstance(entry, Tensor):
        yield entry
    elif entry is not None:
        for item in entry:
            yield from _tensors(item)
