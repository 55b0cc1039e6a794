"""A head that returns the loss or the log-probability of each token instead of logits, inside a context.

    head = chunk_head(model)                    # or a str: the reason why this model needs its logits
    with head.losses(target) as outputs:        # [B, P], for the positions that reach the head
        out = model(**inputs, logits_to_keep=positions)
    loss = (outputs.checked_losses(out.logits) * weights).sum()

Models of transformers end with ``logits = self.lm_head(hidden)`` and return ``out.logits``, which then has the losses,
fp32 [B, P]. The head runs inside the forward of the model as usual, so FSDP2 gathers its weight and reduces its
gradient. Class name, parameters and state dict of the head stay as in ``nn.Linear`` (:mod:`~octavo.fp8.dense.swap`),
and outside of the context so does its forward: generation and evaluation get logits.

A head that is an FP8 layer computes losses, and logits, by FP8 GEMMs with the casts, backends and weight codes of its
site.

:meth:`ChunkedHead.log_probs` returns log-probabilities instead, and the entropy as ``outputs.entropy``.

Models that modify their logits (soft-capping, a scale) would modify the losses. :func:`chunk_head` runs the forward of
the model once, on two tokens and with all modules replaced, and rejects models whose ``out.logits`` is not the output
of the head; :meth:`TokenOutputs.checked_losses` checks that again at every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.fp8.dense.graph_counts import count_output
from octavo.fp8.dense.linear import CountedForward, Linear
from octavo.fp8.dense.swap import SwappedModule, has_hooks, make_trial_module, replace, stock_type
from octavo.fp8.memory.chunked_loss import head_log_probs, head_losses
from octavo.fp8.observe import counts, recorder


class TokenOutputs:
    """The targets of one forward of the head, and its outputs."""

    def __init__(self, judge: Callable[..., Tensor | tuple[Tensor, Tensor]], target: Tensor, **options: Any) -> None:
        self.target = target
        self.entropy: Tensor | None = None
        self._compute, self._options = judge, options
        self._values: Tensor | None = None
        self._version = 0

    def compute(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        """Compute the losses [B, P] of hidden states [B, P, H]. Raises RuntimeError if it is called twice."""
        if self._values is not None:
            raise RuntimeError(
                "the head was called twice inside one `with head.losses(...)`: one call of the model belongs to one "
                "set of targets. Enter it again for each"
            )
        site = head._site if isinstance(head, Linear) else None
        if site is not None and not site.selections:  # inside fp8.high_precision
            site = None
        result = self._compute(hidden, head.weight, self.target, head.bias, site, **self._options)
        self._values, self.entropy = result if isinstance(result, tuple) else (result, None)
        self._version = self._values._version
        return self._values

    def checked_losses(self, logits: Tensor) -> Tensor:
        """Return the logits of the model after checking that they are the unmodified losses. Raises RuntimeError if
        they are not."""
        values = self._values
        if values is None:
            raise RuntimeError("the model's head was not called inside `with head.losses(...)`; use full logits")
        if _view_key(logits) != _view_key(values) or logits._version != self._version:
            raise RuntimeError(
                f"the model changed what its head returned: losses {list(values.shape)} {values.dtype} became "
                f"{list(logits.shape)} {logits.dtype} or were written to. Use full logits with this model"
            )
        return logits


def _view_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for a tensor and views of the whole tensor only."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage()._cdata


class ChunkedHead(SwappedModule):
    """An ``nn.Linear`` head, created by :func:`chunk_head`; see the module docstring."""

    prefix = "Chunked"
    runs_in_high_precision = True
    attributes = ("_given",)
    transient_attributes = ("_given",)

    @contextmanager
    def losses(
        self, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0, chunk: int | None = None
    ) -> Iterator[TokenOutputs]:
        """Make one forward inside the context return losses [B, P] instead of logits [B, P, V].

        ``target`` [B, P]: the class that each position predicts, for the positions that reach the head (selected by
        ``logits_to_keep``, if the model gets it), or -100 for none. With targets on the CPU, positions without a target
        are skipped. Do not pass ``labels`` to the model, which would compute its loss from logits. For the options see
        :func:`~octavo.fp8.memory.chunked_loss.linear_cross_entropy`. Raises RuntimeError if contexts are nested.
        """
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "chunk": chunk}
        with self._request(TokenOutputs(head_losses, target, **options)) as targets:
            yield targets

    @contextmanager
    def log_probs(
        self, target: Tensor, temperature: float = 1.0, entropy: bool = False, chunk: int | None = None
    ) -> Iterator[TokenOutputs]:
        """Make one forward return log-probabilities [B, P] of the targets under softmax(x / temperature), or 0 without
        a target. With ``entropy`` the entropy of this distribution, nats [B, P], is in ``outputs.entropy``
        afterwards."""
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
            output = self._stock.forward(self, *args, **kwargs)
        else:
            (hidden,) = (*args, *kwargs.values())
            assert isinstance(self, nn.Linear)
            output = targets.compute(hidden, self)
        if torch.compiler.is_compiling():  # losses must stay the very tensor
            return output if targets is not None else count_output(self, (*args, *kwargs.values()), output)
        if recorder.counters():  # a head in high precision has one GEMM for all chunks
            counts.report_module(self, (*args, *kwargs.values()), output)
        return output


def chunk_head(model: nn.Module) -> ChunkedHead | str:
    """Convert the head of a model to a :class:`ChunkedHead` and return it, or return why the model needs full logits.

    Call it after adapters are attached and before FSDP2 shards the model. A second call returns the same head.
    """
    get = getattr(model, "get_output_embeddings", None)
    try:
        head = get() if get is not None else None
    except (NotImplementedError, AttributeError):  # models without a head raise either
        head = None
    if not isinstance(head, nn.Module):
        return f"{type(model).__name__} names no output embeddings, so its head is not known"
    if isinstance(head, ChunkedHead):
        return head
    if type(head) is Linear and head._site.scaling is not None:
        return "its head is in FP8 by delayed scaling, and blocks of the vocabulary have no histories"
    kind = stock_type(head) if isinstance(head, CountedForward) else type(head)
    if kind not in (nn.Linear, Linear):
        return f"its head is a {kind.__module__}.{kind.__qualname__}, not a plain nn.Linear"
    if has_hooks(head):
        return "its head has hooks, or a forward of its own, which expect logits there"
    assert isinstance(head, nn.Linear)
    reason = _why_logits_differ(model, head)
    if reason is not None:
        return reason
    replace(head, ChunkedHead)
    assert isinstance(head, ChunkedHead)
    return head


class _BaseOutput:
    """Stand-in for the output of the base model: hidden states, and None for other fields."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _StandIn(nn.Module):
    """Replaces a child of the model and returns a fixed value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.__dict__["value"] = value
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.value


def _why_logits_differ(model: nn.Module, head: nn.Linear) -> str | None:
    """Run the forward that calls the head with all modules replaced. Return None if its logits are the unmodified
    output of the head, else the difference."""
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
        except Exception as error:  # an unknown forward can raise any error
            return f"the forward of {name} fails on a replacement of its body ({type(error).__name__}: {error})"
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or stand.calls != 1:
        return (
            f"the forward of {name} called its head {stand.calls} times and returned {type(logits).__name__} as logits"
        )
    if logits is not losses or logits._version != untouched:  # does not compare values, which may be fake
        return f"{name} changes the logits after its head (soft-capping, a scale): a loss inside the head would miss it"
    return None
