"""Save, restore, reduce, move and rescale the amax histories of delayed scaling.

    state = fp8.scaling_state(model)              # into a checkpoint
    fp8.load_scaling_state(model, state)          # and back
    delayed.reduce_scaling_state(model, group)    # after each step, if ranks have different batches

What a history holds and how casts use it is described in :mod:`octavo.fp8.dense.delayed`.
"""

from octavo.fp8.dense.delayed import (
    load_scaling_state,
    move_scaling,
    named_histories,
    reduce_scaling_state,
    scale_gradient_histories,
    scaling_state,
)

__all__ = [
    "load_scaling_state",
    "move_scaling",
    "named_histories",
    "reduce_scaling_state",
    "scale_gradient_histories",
    "scaling_state",
]
