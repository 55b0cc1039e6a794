"""Checks before a model's weights are read: of the processes, the device and the model's configuration."""

from __future__ import annotations

from octavo import models, parallel
from octavo.base import accelerator
from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.train.errors import TrainError


def check_possible(cfg: Config, world: parallel.World) -> None:
    """Refuse settings that do not work with these processes and their device. Raises TrainError."""
    check_update(cfg, world)
    needs_gpu = {
        "train.offload_activations": cfg.train.offload_activations,
        "train.synchronize_per_layer": cfg.train.synchronize_per_layer,
        "optimizer.offload": cfg.optimizer.offload,
    }
    without_effect = [key for key, on in needs_gpu.items() if on]
    copies = [key for key in without_effect if key != "train.synchronize_per_layer"]
    if copies and accelerator.has_own_memory(world.device) and (lack := accelerator.why_no_streams(world.device)):
        off = " ".join(f"{key}=false" for key in copies)
        raise TrainError(f"{' and '.join(copies)}: the device cannot copy while it computes: {lack}. Set {off}")
    if without_effect and not accelerator.has_own_memory(world.device):
        raise TrainError(
            f"{' and '.join(without_effect)} {'needs' if len(without_effect) == 1 else 'need'} a GPU: on "
            f"{world.device} everything is in host memory already, and "
            f"nothing runs asynchronously. Set {' '.join(f'{key}=false' for key in without_effect)}"
        )


def check_update(cfg: Config, world: parallel.World) -> None:
    """Raise TrainError if weights are updated in backward and a step has several micro-batches, because gradients would
    have to accumulate."""
    each = cfg.train.micro_batch * world.data_size
    if cfg.optimizer.update == "backward" and cfg.train.global_batch > each:
        raise TrainError(
            f"optimizer.update: backward takes one micro-batch a step and process, and {cfg.train.global_batch} "
            f"samples (train.global_batch) are {-(-cfg.train.global_batch // each)} of {cfg.train.micro_batch} on "
            f"{world.data_size} process(es). Set train.global_batch={each}, raise train.micro_batch, or use "
            "optimizer.update: step"
        )


def check_family(cfg: Config) -> None:
    """Refuse a model that Octavo can plan but not train, by its configuration only."""
    config = models.read_config(cfg.model.path)
    if (why := models.why_not_trained(config)) is not None:
        raise TrainError(
            f"model_type {config.model_type!r} can be planned but not trained: {why}. `octavo doctor --families` "
            "lists the families that train"
        )
    if left := getattr(getattr(config, "audio_config", None), "encoder_layerdrop", 0):
        raise TrainError(
            f"{cfg.model.path}/config.json: encoder_layerdrop of audio_config is {left:g}, which skips random layers "
            "in training, so GEMMs could not be checked against the plan. Set it to 0"
        )
    if cfg.train.phase in BEYOND_SFT and getattr(config, "audio_config", None) is not None:
        raise TrainError(
            f"train.phase: {cfg.train.phase} does not support audio models in this version ({config.model_type}). "
            "Use sft"
        )


def refuse_cuda_graphs(why: str | None) -> None:
    """Raises TrainError for a reason why no step can use CUDA graphs; None: they can be used."""
    if why is not None:
        raise TrainError(f"train.cuda_graphs: true is not possible: {why}. Or set train.cuda_graphs: false")
