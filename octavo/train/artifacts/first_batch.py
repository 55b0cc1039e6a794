"""Runs the first micro-batch through a model's weights, before there is a run: `octavo plan --first-batch`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo import fp8, models, parallel
from octavo.base import accelerator
from octavo.config import Config
from octavo.data.loaders.from_config import train_loader
from octavo.train.errors import TrainError
from octavo.train.forward.forward import Forward, autocast_dtype
from octavo.train.forward.massive_activations import InputStatistics, watch_inputs
from octavo.train.setup.model_setup import load_weights
from octavo.train.setup.phase import SFT
from octavo.train.setup.resolve_config import data_settings, load_processor


def read_first_inputs(cfg: Config, plan: fp8.Plan, log: Callable[[str], None]) -> dict[str, InputStatistics]:
    """Return the figures of the inputs of `plan`'s FP8 layers in the forward of the first micro-batch, by layer.

    Reads the weights, and computes in high precision without gradients. Raises TrainError for phases whose batches are
    not rows of text, and the errors of training on these rows.
    """
    if cfg.train.phase not in SFT.names:
        raise TrainError(
            f"--first-batch reads rows of the phases {' and '.join(SFT.names)}, and train.phase is {cfg.train.phase}; "
            "octavo train reports massive activations of its first step in every phase"
        )
    world = parallel.World(device=accelerator.default_device())
    train = cfg.train.model_copy(update={"global_batch": cfg.train.micro_batch})
    settings = data_settings(
        cfg.model_copy(update={"train": train, "data": cfg.data.model_copy(update={"workers": 0})})
    )
    loader = train_loader(settings, load_processor(cfg))
    try:
        batch = next(batch for step in loader for batch in step if batch["meta"].samples)
    finally:
        loader.close()
    model, _ = load_weights(cfg, world.device, log)
    packed = models.Packed(model, models.describe(model), None) if cfg.data.packing else None
    forward = Forward(model, world, autocast_dtype(cfg, world.device), packed=packed)
    with watch_inputs(model, plan) as watch, torch.no_grad():
        forward(batch, torch.zeros(1, dtype=torch.int64))  # the logits of one position
        return watch.statistics()
