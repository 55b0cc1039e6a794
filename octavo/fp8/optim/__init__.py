"""AdamW with FP8 or BF16 states and BF16 weights."""

from octavo.fp8.optim.adamw import AdamW
from octavo.fp8.optim.convert import decode, fp32_weight, set_weight
from octavo.fp8.optim.in_backward import PartialUpdate, UpdateInBackward, clip_factor, gradient_norm
from octavo.fp8.optim.layout import PER_GROUP, local_groups, num_groups, shard_like
from octavo.fp8.optim.offload import OffloadedAdamW
from octavo.fp8.optim.state_dict import old_coat_note

__all__ = [
    "AdamW",
    "OffloadedAdamW",
    "PER_GROUP",
    "PartialUpdate",
    "UpdateInBackward",
    "clip_factor",
    "decode",
    "old_coat_note",
    "fp32_weight",
    "gradient_norm",
    "num_groups",
    "shard_like",
    "set_weight",
    "local_groups",
]
