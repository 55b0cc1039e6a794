"""Checks of the processes, the device, the model's configuration, and of ranks that share the rows and experts of a
model with its plan, before weights are read. A run and `octavo plan` both use the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo import fp8, models, parallel
from octavo.base import accelerator
from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.fp8.dense import WireFormat
from octavo.parallel import NO_CODED_EXCHANGE, Layout, WorldError, check_experts, ulysses_size
from octavo.train.errors import TrainError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_supported(cfg: Config, world: parallel.World) -> None:
    """Raise TrainError for settings that do not work with these processes and their device."""
    check_update(cfg, world)
    needs_gpu = {
        "train.offload_activations": cfg.train.offload_activations,
        "train.synchronize_per_layer": cfg.train.synchronize_per_layer,
        "optimizer.offload": cfg.optimizer.offload,
    }
    without_effect = [key for key, on in needs_gpu.items() if on]
    copies = [key for key in without_effect if key != "train.synchronize_per_layer"]
    if copies and accelerator.has_own_memory(world.device) and (reason := accelerator.why_no_streams(world.device)):
        off = " ".join(f"{key}=false" for key in copies)
        raise TrainError(f"{' and '.join(copies)}: the device cannot copy while it computes: {reason}. Set {off}")
    if without_effect and not accelerator.has_own_memory(world.device):
        raise TrainError(
            f"{' and '.join(without_effect)} {'needs' if len(without_effect) == 1 else 'need'} a GPU: on "
            f"{world.device} everything is in host memory already, and nothing runs asynchronously. Set "
            f"{' '.join(f'{key}=false' for key in without_effect)}"
        )


def check_update(cfg: Config, world: parallel.World) -> None:
    """Raise TrainError if weights are updated in backward and a step has several micro-batches.

    Their gradients would have to accumulate.
    """
    per_step = cfg.train.micro_batch * world.data_size
    if cfg.optimizer.update == "backward" and cfg.train.global_batch > per_step:
        raise TrainError(
            f"optimizer.update: backward takes one micro-batch per step and process, but {cfg.train.global_batch} "
            f"samples (train.global_batch) are {-(-cfg.train.global_batch // per_step)} of {cfg.train.micro_batch} on "
            f"{world.data_size} process(es). Set train.global_batch={per_step}, raise train.micro_batch, or use "
            "optimizer.update: step"
        )


def check_family(cfg: Config) -> None:
    """Raise TrainError for a model that Octavo can plan but not train, according to its configuration."""
    config = models.read_config(cfg.model.path)
    if (why := models.why_not_trained(config)) is not None:
        raise TrainError(
            f"model_type {config.model_type!r} can be planned but not trained: {why}. `octavo doctor --families` "
            "lists the families that train"
        )
    if layerdrop := getattr(getattr(config, "audio_config", None), "encoder_layerdrop", 0):
        raise TrainError(
            f"{cfg.model.path}/config.json: encoder_layerdrop of audio_config is {layerdrop:g}, which skips random "
            "layers in training, so GEMMs could not be checked against the plan. Set it to 0"
        )
    if cfg.train.phase in BEYOND_SFT and getattr(config, "audio_config", None) is not None:
        raise TrainError(
            f"train.phase: {cfg.train.phase} does not support audio models in this version ({config.model_type}). "
            "Use sft"
        )


def refuse_cuda_graphs(why: str | None) -> None:
    """Raise TrainError with the reason ``why`` no step can use CUDA graphs; does nothing if ``why`` is None."""
    if why is not None:
        raise TrainError(f"train.cuda_graphs: true is not possible: {why}. Or set train.cuda_graphs: false")


def check_ranks(cfg: Config, model: PreTrainedModel, plan: fp8.Plan, ranks: int) -> None:
    """Raise WorldError for a mesh with a different number of ranks, and for heads, experts or an exchange that this
    model and plan do not support. ``model`` may be on the meta device; it is not converted yet."""
    if ranks == 1:
        return
    layout = Layout.from_section(ranks, cfg.parallel)
    text = model.config.get_text_config()
    if layout.context > 1:
        ulysses_size(layout.context, cfg.parallel.ulysses, text.num_attention_heads)
    if layout.expert > 1:
        recipes = {row.row.module: row.recipe for row in plan.rows if row.kind == "experts"}
        delayed_recipes = {
            name: recipe.summary() for name, recipe in recipes.items() if recipe and recipe.delayed is not None
        }
        check_experts(model, layout, lambda name, module: delayed_recipes.get(name))
    if cfg.train.exchange == "fp8" and (layout.context > 1 or layout.expert > 1):
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        outputs, *rest = (layers for layers, _ in count_coded_layers(plan, size, text.hidden_size))
        if not (outputs and layout.context > 1) and not (any(rest) and layout.expert > 1):
            raise WorldError(NO_CODED_EXCHANGE)


def count_coded_layers(plan: fp8.Plan, head_dim: int, hidden: int) -> list[tuple[int, float]]:
    """Return (layers, bytes per value) of each tensor that ranks send as codes (:mod:`octavo.parallel.wire`): outputs
    of attention, rows dispatched to experts, gradients of their results."""

    def count(
        name: str, coding: Callable[[fp8.Recipe | None, int], WireFormat | None], piece: int
    ) -> tuple[int, float]:
        recipes = (row.recipe for row in plan.rows if row.component == "foundation" and row.name.endswith(name))
        codings = [coding_of_layer for recipe in recipes if (coding_of_layer := coding(recipe, piece)) is not None]
        return len(codings), codings[0].bytes_per_value if codings else 0.0

    return [
        count(".o_proj", WireFormat.for_inputs, head_dim),
        count(".experts.gate_up_proj", WireFormat.for_inputs, hidden),
        count(".experts.down_proj", WireFormat.for_gradients, hidden),
    ]
