"""A model's own head that returns the loss or the log-probability of every token in place of logits, while asked to.

    head = chunk_head(model)                    # or a str: why this model needs its logits
    with head.losses(target) as given:            # [B, P], for the positions that the head is given
        out = model(**inputs, logits_to_keep=positions)
    loss = (given.take(out.logits) * weights).sum()

Transformers' models end in ``logits = self.lm_head(hidden)`` and hand that on as ``out.logits``: so the losses, fp32
[B, P], come out there. The head runs where it always does, inside the model's forward: under FSDP2 its weight is
gathered there, and its gradient is reduced as ever. Class, names and state dict of the head stay as in ``nn.Linear``
(:mod:`~octavo.fp8.dense.swap`), and outside the ``with`` so does its forward: generation and evaluation see logits.

A head that a plan made an FP8 layer gives its losses by FP8 GEMMs, with the casts, backends and weight codes of its
site; its logits outside as well.

:meth:`ChunkedHead.log_probs` returns log-probabilities instead, and the entropy as ``given.entropy``.

Models that do something to their logits (soft-capping, a scale) would do it to the losses. :func:`chunk_head` runs
the model's own forward once, on two tokens and with every module in it replaced, and refuses a model
whose ``out.logits`` is not what its head returned; :meth:`TokenOutputs.take` looks again at every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.fp8.dense.linear import Linear
from octavo.fp8.dense.swap import SwappedModule, has_hooks, make_trial_module, swap
from octavo.fp8.memory.chunked_loss import head_log_probs, head_losses


class TokenOutputs:
    """The targets that a head is asked to judge, and what it gave."""

    def __init__(self, judge: Callable[..., Tensor | tuple[Tensor, Tensor]], target: Tensor, **options: Any) -> None:
        self.target = target
        self.entropy: Tensor | None = None
        self._compute, self._options = judge, options
        self._values: Tensor | None = None
        self._version = 0

    def compute(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        """The losses [B, P] of these hidden states [B, P, H]. Raises RuntimeError for a second call."""
        if self._values is not None:
            raise RuntimeError(
                "the head was called twice inside one `with head.losses(...)`: one call of the model belongs to one "
                "set of targets. Enter it again for each"
            )
        site = head._site if isinstance(head, Linear) else None
        if site is not None and not site.selections:  # for a moment of high precision
            site = None
        judged = self._compute(hidden, head.weight, self.target, head.bias, site, **self._options)
        self._values, self.entropy = judged if isinstance(judged, tuple) else (judged, None)
        self._version = self._values._version
        return self._values

    def take(self, logits: Tensor) -> Tensor:
        """What the model returned as logits, once it is sure that these are the losses, untouched.

        Raises RuntimeError where they are not, naming what was found.
        """
        mine = self._values
        if mine is None:
            raise RuntimeError("the model's head was not called inside `with head.losses(...)`; use full logits")
        if _view_key(logits) != _view_key(mine) or logits._version != self._version:
            raise RuntimeError(
                f"the model changed what its head returned: losses {list(mine.shape)} {mine.dtype} became "
                f"{list(logits.shape)} {logits.dtype} or were written to. Use full logits with this model"
            )
        return logits


def _view_key(tensor: Tensor) -> tuple[Any, ...]:
    """What a view of the whole tensor has in common with it, and nothing else has."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage()._cdata


class ChunkedHead(SwappedModule):
    """An ``nn.Linear`` head; see the module's docstring. Made by :func:`chunk_head`."""

    prefix = "Chunked"
    runs_in_high_precision = True
    attributes = ("_given",)
    transient_attributes = ("_given",)

    @contextmanager
    def losses(
        self, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0, chunk: int | None = None
    ) -> Iterator[TokenOutputs]:
        """Inside, one forward of the model returns losses [B, P] where it returns logits [B, P, V] else.

        ``target`` [B, P]: the class that each position predicts, for the positions that reach the head (those of
        ``logits_to_keep``, if the model was given that); -100: none. On the CPU, positions without a target are left
        out of all work. The model itself gets no ``labels``: the loss it makes of them is one of logits. Options as
        :func:`~octavo.fp8.memory.chunked_loss.linear_cross_entropy`. Raises RuntimeError if the head
        is waiting for a forward already.
        """
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "chunk": chunk}
        with self._request(TokenOutputs(head_losses, target, **options)) as targets:
            yield targets

    @contextmanager
    def log_probs(
        self, target: Tensor, temperature: float = 1.0, entropy: bool = False, chunk: int | None = None
    ) -> Iterator[TokenOutputs]:
        """The same with log-probabilities [B, P] at the targets, 0 where there is none, of softmax(x / temperature);
        with ``entropy`` also that of this distribution, nats [B, P], as ``given.entropy`` after the forward."""
        options: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "chunk": chunk}
        with self._request(TokenOutputs(head_log_probs, target, **options)) as targets:
            yield targets

    @contextmanager
    def _request(self, targets: TokenOutputs) -> Iterator[TokenOutputs]:
        if self.__dict__.get("_given") is not None:
            raise RuntimeError(
                "`with head.losses(...)` was entered inside another one of the same head; leave it first"
            )
        self.__dict__["_given"] = targets
        try:
            yield targets
        finally:
            self.__dict__["_given"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        targets: TokenOutputs | None = self.__dict__.get("_given")
        if targets is None:
            return self._stock.forward(self, *args, **kwargs)
        (hidden,) = (*args, *kwargs.values())
        assert isinstance(self, nn.Linear)
        return targets.compute(hidden, self)


def chunk_head(model: nn.Module) -> ChunkedHead | str:
    """The model's head, able to return losses from now on; or why this model needs its full logits, in a sentence.

    Call it before FSDP2 shards the model and after adapters are in place. A second call returns the same head.
    """
    get = getattr(model, "get_output_embeddings", None)
    try:
        head = get() if get is not None else None
    except (NotImplementedError, AttributeError):  # models without a head say so in either way
        head = None
    if not isinstance(head, nn.Module):
        return f"{type(model).__name__} names no output embeddings, so its head is not known"
    if isinstance(head, ChunkedHead):
        return head
    if type(head) is Linear and head._site.scaling is not None:
        return "its head is in FP8 by delayed scaling, and blocks of the vocabulary have no histories"
    if type(head) not in (nn.Linear, Linear):
        kind = type(head)
        return f"its head is a {kind.__module__}.{kind.__qualname__}, not a plain nn.Linear"
    if has_hooks(head):
        return "its head has hooks, or a forward of its own, which expect logits there"
    assert isinstance(head, nn.Linear)
    reason = _why_logits_differ(model, head)
    if reason is not None:
        return reason
    swap(head, ChunkedHead)
    assert isinstance(head, ChunkedHead)
    return head


class _BaseOutput:
    """What a base model returns, to a head's model: hidden states first, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _StandIn(nn.Module):
    """In place of a child of the model, it returns one thing."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.__dict__["value"] = value
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.value


def _why_logits_differ(model: nn.Module, head: nn.Linear) -> str | None:
    """Run the forward that calls the head, with the head and everything else replaced: None if it returns the head's
    output as its logits, untouched, else what it does."""
    parents = [m for m in model.modules() if any(child is head for child in m._modules.values())]
    if len(parents) != 1:
        return f"{len(parents)} modules of the model hold its head as their child"
    parent = parents[0]
    name = type(parent).__name__
    if "forward" in parent.__dict__:
        return f"the forward of {name} was replaced on the instance (an accelerate hook?)"
    hidden, losses = torch.zeros(1, 2, head.in_features), torch.zeros(1, 2)
    untouched = losses._version
    stand = _StandIn(losses)
    children = {n: stand if m is head else _StandIn(_BaseOutput(hidden)) for n, m in parent._modules.items()}
    known = inspect.signature(type(parent).forward).parameters
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, 2, dtype=torch.int64)}
    inputs |= {"use_cache": False} if "use_cache" in known else {}
    with torch.no_grad():
        try:
            out = type(parent).forward(make_trial_module(parent, {}, children), **inputs)
        except Exception as error:  # a forward that is not known may fail in any way
            return f"the forward of {name} fails on a replacement of its body ({type(error).__name__}: {error})"
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or stand.calls != 1:
        return (
            f"the forward of {name} called its head {stand.calls} times and returned {type(logits).__name__} as logits"
        )
    if logits is not losses or logits._version != untouched:  # no look at values: they may be fake
        return f"{name} changes the logits after its head (soft-capping, a scale): a loss inside the head would miss it"
    return None
