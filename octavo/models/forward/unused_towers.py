"""A dummy image times zero: the vision tower takes part in every step, also where a batch has no image.

Why: in data-parallel training every rank has to run the same collectives. A rank whose rows hold no image would skip
the tower, its all-gathers and its reduce-scatters, and the other ranks would wait for ever. And an unfrozen tower that
a step never reaches has gradients None where others have tensors. So the tower runs on the smallest image, and what
comes out enters the language model's input as nothing at all: the value is unchanged, the gradient exactly zero. The
same of sound, of which the tower hears silence.

Experts that images alone reach (Ernie 4.5 VL's) stand in the decoder, where a layer calls them if there is an image.
Where it does not, they run on no token at all, for the same two reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from octavo.models.errors import ModelError
from octavo.models.structure.audio_shapes import hearing_of
from octavo.models.structure.describe import Family
from octavo.models.structure.vision_shapes import vision_of


class _Join(torch.autograd.Function):
    """`embeds` unchanged; its gradient passes, every feature receives zeros.

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
    """The smallest black image of a family, as its `get_image_features` takes it, on the tower's device."""
    if not family.has_vision:
        raise ModelError(f"{family.name} takes no images; only a vision-language model needs a dummy image.")
    parameter = next(model.get_submodule(family.tower).parameters())
    return vision_of(model.config).smallest(parameter.device, parameter.dtype)


def attach_dummy_image(
    model: nn.Module,
    family: Family,
    enabled: Callable[[], bool],
    guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> RemovableHandle:
    """Run tower and projector on a dummy image before the language model, whenever `enabled()` is true.

    enabled  asked once a forward: true for a batch without images (or always: harmless, one small image)
    guard    context around the extra forward, e.g. `octavo.fp8.observe.uncounted`, so that it enters no amax history,
             health figure or GEMM count

    The tower runs frozen or not. Losses and other gradients are bit-identical to a model without the hook; unfrozen
    parameters of tower and projector get gradients of exactly zero. Returns a handle; `remove()` takes the hook away.
    """
    owner = model.get_submodule(family.tower.rpartition(".")[0])
    dummy_image_inputs(model, family)  # a family without images is refused here, not in the first step

    def features() -> Iterator[Tensor]:
        return _features(owner.get_image_features(**dummy_image_inputs(model, family)))

    return _attach(model, family, "image", enabled, guard, features)


def attach_dummy_sound(
    model: nn.Module,
    family: Family,
    enabled: Callable[[], bool],
    guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> RemovableHandle:
    """The same of the tower of sound and its projector, on silence: one sound of full length, since towers take no
    shorter one. Raises ModelError for a family whose way Octavo does not know."""
    if not family.has_audio:
        raise ModelError(f"{family.name} takes no sound; only a model with a tower of sound needs a dummy sound.")
    hearing = hearing_of(model.config)  # type: ignore[arg-type]
    tower = model.get_submodule(family.audio_tower)
    globs = family.components["audio_projector"]
    projectors = [model.get_submodule(glob.removesuffix(".**")) for glob in globs]

    def features() -> Iterator[Tensor]:
        parameter = next(tower.parameters())
        heard = tower(hearing.smallest(parameter.device, parameter.dtype)).last_hidden_state
        for projector in projectors:
            heard = projector(heard)
        yield heard

    return _attach(model, family, "sound", enabled, guard, features)


def attach_idle_experts(
    model: nn.Module, family: Family, guard: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> list[RemovableHandle]:
    """Run the experts that images alone reach on no token, in each forward whose layer does not call them; a family
    without such experts gets no hook.

    Values are unchanged, their parameters get gradients of exactly zero, and experts that are dealt to ranks take part
    in every exchange. Which forwards these are is up to the tokens at hand, not to the batch: of ranks that share a row
    one may have no token of its images.
    """
    inside = f"{family.language_model}."
    names = [name for name, _ in model.named_modules() if name.startswith(inside)]
    names = [name for name in names if family.component_of(name) == "image_projector"]
    outermost = [name for name in names if name.rpartition(".")[0] not in names]
    return [
        handle
        for name in outermost
        for handle in _Idle(model.get_submodule(name), guard).attach(model.get_submodule(name.rpartition(".")[0]))
    ]


class _Idle:
    """The hooks of one layer: whether it called its experts for images, and what happens if not."""

    def __init__(self, experts: nn.Module, guard: Callable[[], AbstractContextManager[Any]]) -> None:
        self.experts, self.guard, self.called = experts, guard, False

    def attach(self, layer: nn.Module) -> list[RemovableHandle]:
        """``layer``: the module that calls the experts, and returns a tuple of which the hidden states are first."""
        return [
            layer.register_forward_pre_hook(self._begin),
            self.experts.register_forward_hook(self._note),
            layer.register_forward_hook(self._end),
        ]

    def _begin(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self.called = False

    def _note(self, experts: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.called = True

    def _end(self, layer: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.called:
            return None
        hidden, *rest = output
        nothing = hidden.new_empty(0, requires_grad=torch.is_grad_enabled())  # so that a backward exchanges, too
        with self.guard():
            return _Join.apply(hidden, *_tensors(self.experts(nothing))), *rest


def _attach(
    model: nn.Module, family: Family, what: str, enabled: Callable[[], bool],
    guard: Callable[[], AbstractContextManager[Any]], features: Callable[[], Iterator[Tensor]],
) -> RemovableHandle:  # fmt: skip
    """Let `features` join the input of the language model whenever `enabled()` is true."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if not enabled():
            return None
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            raise ModelError(
                f"the language model of {family.name} was called without inputs_embeds, so a dummy {what} cannot join; "
                "call the whole model, not its language model alone."
            )
        with guard():
            embeds = _Join.apply(embeds, *features())
        return args, {**kwargs, "inputs_embeds": embeds}

    return model.get_submodule(family.language_model).register_forward_pre_hook(hook, with_kwargs=True)


def _features(output: Any) -> Iterator[Tensor]:
    """The projector's outputs: what enters the language model, DeepStack's included."""
    for entry in (output.pooler_output, getattr(output, "deepstack_features", None)):
        yield from _tensors(entry)


def _tensors(entry: Any) -> Iterator[Tensor]:
    if isinstance(entry, Tensor):
        yield entry
    elif entry is not None:
        for item in entry:
            yield from _tensors(item)
