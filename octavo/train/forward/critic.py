"""A critic for PPO: the value of each state, by a value head on the last hidden states.

lora                the head and a second adapter on the policy's base: a separate forward over the same weights,
                    without a second base in memory
full-parameter      the head on the policy's hidden states: no extra forward, and its loss reaches the shared trunk

The critic's parameters belong to the model, so that sharding, optimizer, checkpoints and memory treat them like any
others. The outputs of a run (`hf/`, `adapter/`) contain only the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo import adapters, models
from octavo.config import Config
from octavo.config.sections.rl import WITH_CRITIC
from octavo.train.errors import TrainError
from octavo.train.forward.forward import model_dtype


class ValueHead(nn.Module):
    """The critic's last layer: hidden states [..., H] in any precision -> values [...] in fp32.

    It starts at 0, so that the first advantages are rewards and the first gradient reaches only the head. It is not an
    ``nn.Linear``, which a plan could make an FP8 layer.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32, device: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))  # [1], because FSDP2 cannot shard a scalar

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.float() @ self.weight.float() + self.bias.float()


def is_enabled(cfg: Config) -> bool:
    """True if a run has a critic."""
    return cfg.train.phase == "rl" and cfg.rl is not None and cfg.rl.algorithm in WITH_CRITIC


def attach(model: nn.Module, cfg: Config, device: torch.device | None = None) -> None:
    """Add the run's critic to a model, after its adapters if it has any, on ``device`` (default: the model's device).

    Raises TrainError if the model's head, and so its last hidden states, are not known."""
    weight = _head(model).weight
    dtype = model_dtype(cfg)
    if cfg.lora is not None and adapters.adapted_layers(
        model
    ):  # the part of a model that a memory estimate runs may have none
        adapters.attach_second(model, cfg.lora, cfg.run.seed + 1, device)
        dtype = adapters.DTYPES[cfg.lora.dtype]
    assert isinstance(weight, Tensor)
    model.add_module(models.VALUE_HEAD, ValueHead(weight.shape[1], dtype, device or weight.device))


def is_critic_parameter(name: str) -> bool:
    """True if this is the name of a parameter of the critic."""
    return name.startswith(f"{models.VALUE_HEAD}.") or adapters.is_second_parameter(name)


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of the critic."""
    return [p for name, p in model.named_parameters() if p.requires_grad and is_critic_parameter(name)]


@contextmanager
def values(model: nn.Module, alone: bool) -> Iterator[list[Tensor]]:
    """Context in which a forward of the model appends the values [B, P], fp32, of the positions that reach its head to
    the list. With ``alone`` the head returns these values instead of logits, which are not computed.

    Values are computed where the head is called, inside the model's forward, because FSDP2 has gathered the parameters
    there.
    """
    head, collected = _head(model), []
    stock = head.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        collected.append(model.get_submodule(models.VALUE_HEAD)(hidden))
        return collected[-1] if alone else stock(hidden, *args, **kwargs)

    head.forward = forward
    try:
        yield collected
    finally:
        del head.forward


def _head(model: nn.Module) -> nn.Module:
    get = getattr(model, "get_output_embeddings", None)
    try:
        head = None if get is None else get()
    except (NotImplementedError, AttributeError):  # raised by models without a head
        head = None
    if not isinstance(head, nn.Module) or not isinstance(getattr(head, "weight", None), Tensor):
        raise TrainError(
            f"a critic needs the last hidden states, and {type(model).__name__} names no output embeddings that get "
            "them. Use an algorithm without a critic (rl.algorithm: grpo)"
        )
    return head
