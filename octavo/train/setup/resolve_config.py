"""Resolves settings that a configuration leaves open, before the run directory exists.

They are the recipe of an FP8 checkpoint, the number of steps for `train.epochs`, and the video settings of the model's
family. The run saves the resolved configuration, which can be rerun as is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from octavo import models
from octavo.base.recipe_specs import RECIPES_OF_KIND
from octavo.config import Config, override
from octavo.config.stages import stage_configs, with_stage_steps
from octavo.data.loaders.from_config import count_packs
from octavo.data.loaders.rows_from_config import count_epoch_rows
from octavo.fp8.weights import FROZEN
from octavo.models.folder.quantization import read_quantization


def resolve_recipe(cfg: Config) -> Config:
    """Return the configuration with the recipe that fits an FP8 checkpoint, unless it names a recipe.

    If the checkpoint's blocks do not fit any recipe, the recipe is off, and codes are dequantized where they are used.
    """
    named = "recipe" in cfg.fp8.model_fields_set or cfg.fp8.plan is not None or bool(cfg.model.load_in_fp8.kinds)
    if cfg.lora is None or not cfg.model.keep_fp8 or named:
        return cfg
    quantization = read_quantization(cfg.model.path)
    if quantization is None:
        return cfg
    fits = quantization.spec.block == FROZEN[quantization.kind].block
    section = cfg.fp8.model_copy(update={"recipe": RECIPES_OF_KIND[quantization.kind][0] if fits else "off"})
    return cfg.model_copy(update={"fp8": section})


def resolve_steps(cfg: Config, log: Callable[[str], None] = lambda text: None) -> Config:
    """Return the configuration with `train.epochs` converted to steps; the last step may go beyond the epochs.

    Reads the data, all of it if rows are packed. `log` receives lines about the counts. Raises DataError, and
    ConfigError for settings such as a warm-up that need more steps.
    """
    if cfg.train.stages:
        return with_stage_steps(cfg, [resolve_steps(stage, log).train.steps for stage in stage_configs(cfg)])
    epochs, batch = cfg.train.epochs, cfg.train.global_batch
    if epochs is None:
        return cfg
    if cfg.data.packing:
        log("train.epochs: counting the tokens of every row to find the number of packs in an epoch")
        unit, total = "packs", float(count_packs(data_settings(cfg), load_processor(cfg), epochs))
    else:
        unit, total = "rows", epochs * count_epoch_rows(cfg, partial(load_processor, cfg))
    steps = max(1, math.ceil(round(total / batch, 9)))  # rounded because 0.1 of 30 rows is 3.0000000000000004
    each = round(total / epochs, 1)
    log(f"train.epochs: {epochs:g} of {each:.12g} {unit} are {steps} steps of {batch}, {each / batch:.4g} per epoch")
    return override(cfg, [f"train.steps={steps}", "train.epochs=null"])


def resolve_video(cfg: Config) -> Config:
    """Return the configuration with the values of `data.video` that it leaves to the model's family.

    Another version of Octavo may change these defaults. A configuration without the section is returned unchanged.
    Raises ModelError.
    """
    if cfg.data.video is None:
        return cfg
    values = load_processor(cfg).videos.settings
    section = cfg.data.model_copy(update={"video": cfg.data.video.model_copy(update=values)})
    return cfg.model_copy(update={"data": section})


def resolve_from_checkpoint(cfg: Config) -> Config:
    """Return the configuration for a run with a checkpoint, without the initial adapter (`lora.adapter`)."""
    if cfg.lora is None or cfg.lora.adapter is None:
        return cfg
    return cfg.model_copy(update={"lora": cfg.lora.model_copy(update={"adapter": None})})


def data_settings(cfg: Config) -> Config:
    """Return the configuration for octavo.data; pretraining trains on every token, including prompts."""
    if cfg.train.phase != "pretrain":
        return cfg
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"train_on_prompt": True})})


def load_processor(cfg: Config, folder: str | Path | None = None) -> Any:
    """Load the processor of a model folder (default: the configuration's) with the data settings; raises ModelError."""
    data = cfg.data
    video = None if data.video is None else data.video.model_dump(include=set(models.VIDEO_SETTINGS))
    return models.load_processor(folder or cfg.model.path, data.max_pixels, data.min_pixels, data.template_args, video)


def random_init(cfg: Config) -> tuple[int, float | None] | None:
    """Return (seed, standard deviation or None) of random initial weights, or None if they are not random."""
    return (cfg.run.seed, cfg.model.init_std) if cfg.model.init == "random" else None
