"""The forward of the model on a batch, in training and evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo import fp8, models
from octavo.base import accelerator
from octavo.config import Config
from octavo.fp8.memory import ChunkedHead, chunk_head
from octavo.fp8.observe import uncounted
from octavo.models.forward.unused_towers import attach_dummy_image, attach_dummy_sound, attach_idle_experts
from octavo.parallel import Context, ImageSharding, World
from octavo.train.errors import TrainError
from octavo.train.forward import balance


def model_dtype(cfg: Config) -> torch.dtype:
    """Return the dtype of the model's parameters: fp32, or BF16 if the optimizer keeps their lower bits or rounds. The
    frozen base of LoRA is BF16 unless `train.precision` is fp32; adapters have `lora.dtype`."""
    if cfg.lora is not None:
        return torch.float32 if cfg.train.precision == "fp32" else torch.bfloat16
    return torch.float32 if cfg.optimizer.master == "fp32" else torch.bfloat16


def autocast_dtype(cfg: Config, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast, or None if autocast is off.

    For a model with fp32 parameters it is `train.precision`; `auto` stands for the default of the device
    (`accelerator.autocast_dtype`). A model with BF16 parameters needs no autocast.
    """
    if model_dtype(cfg) != torch.float32:
        return None
    return (
        accelerator.autocast_dtype(device) if cfg.train.precision == "auto" else LOW_PRECISION.get(cfg.train.precision)
    )


LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""`train.precision` -> dtype of autocast."""


def gathers_bf16(cfg: Config, ranks: int) -> bool:
    """True if ranks gather fp32 parameters in BF16. The forward then runs as in a BF16 model, without autocast."""
    return cfg.train.gather == "bf16" and ranks > 1


def chunked_head(model: nn.Module) -> ChunkedHead | str:
    """Return the chunked head of a model, or the reason why its head cannot compute only positions with a target."""
    return why_not_chunked(model) or chunk_head(model)


def why_not_chunked(model: nn.Module) -> str | None:
    """Return why the head of a model cannot compute only some positions, or None if it can."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return None
    return f"{type(model).__name__} passes all positions to its head (it has no argument logits_to_keep)"


class Forward:
    """Calls the model: moves the batch to the device, enters autocast, and computes only the logits that are needed.

    autocast        dtype of autocast, or None to disable it
    dtype           dtype of pixels without autocast; by default the dtype of the parameters
    packed          attention of packs, or None if batches are not packed
    context         ranks that share the tokens of packs, or None. Logits and `keep` then belong to this rank's tokens
    image_sharding  distributes the images of a pack over those ranks

    The attributes `images` and `sounds` are True if the current batch has images or videos, and sounds. The hooks for
    dummy inputs read them. Videos go through the tower as images (:mod:`octavo.models.processors.frames`).
    """

    def __init__(
        self, model: nn.Module, world: World, autocast: torch.dtype | None, dtype: torch.dtype | None = None,
        packed: models.Packed | None = None, context: Context | None = None,
        image_sharding: ImageSharding | None = None,
    ) -> None:  # fmt: skip
        self.model, self.device, self.autocast, self.packed = model, world.device, autocast, packed
        self.context, self.image_sharding = context, image_sharding
        self.images = self.sounds = False
        parameter_dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.dtype = dtype or parameter_dtype
        known = inspect.signature(model.forward).parameters
        self._selects_logits = "logits_to_keep" in known
        self._accepts_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        self._accepted_names = frozenset(known)

    def __call__(self, batch: dict[str, Any], keep: Tensor | None = None) -> Tensor:
        """Return the logits [B, P, V] at the positions `keep` [P], by default at all positions."""
        return self._run(batch, keep)[0]

    def needs_dummy(self, needed: bool) -> None:
        """Set whether a forward outside this class (an engine's) needs the dummy image of
        :func:`run_towers_on_dummy_inputs`."""
        self.images = not needed

    def part(self, batch: dict[str, Any]) -> slice:
        """Return the slice of a batch's tokens that this rank computes."""
        if self.context is None or "boundaries" not in batch:
            return slice(0, batch["input_ids"].shape[1])
        return self.context.local_slice(batch["boundaries"].length)

    def has_images_here(self, batch: dict[str, Any]) -> bool:
        """True if this rank encodes an image or a video of the batch."""
        if self.image_sharding is not None and "boundaries" in batch:
            return self.image_sharding.has_local_images(self._with_videos_as_images(batch))
        sees: bool = batch["meta"].sees
        return sees

    def balanced(self, batch: dict[str, Any], keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits as in :meth:`__call__`, and the routers' load-balancing loss of this batch, a scalar
        (:mod:`octavo.train.forward.routing`). Raises TrainError if the model returns no such loss."""
        options: dict[str, Any] = {"output_router_logits": True}
        tokens = real(batch) if "boundaries" in batch else None  # padding of a pack does not count
        if tokens is not None and self.context is None:
            options["attention_mask"] = tokens.to(self.device)
        logits, out = self._run(batch, keep, **options)
        if self.context is not None and "boundaries" in batch:
            local_tokens = None if tokens is None else tokens[0, self.part(batch)].to(self.device)
            return logits, balance.local_part(out, self.model, local_tokens, self.context)
        loss = getattr(out, "aux_loss", None)
        if not isinstance(loss, Tensor):
            raise TrainError(
                f"{type(self.model).__name__} returned no load-balancing loss of its routers. Set "
                "train.router_aux_loss_coef: 0"
            )
        return logits, loss

    def _run(self, batch: dict[str, Any], keep: Tensor | None, **options: Any) -> tuple[Tensor, Any]:
        """Return (logits at `keep`, the model's output)."""
        original, batch = batch, self._with_videos_as_images(batch)
        if original is not batch and "boundaries" not in batch:
            batch["position_ids"] = models.batch_positions(self.model, original)  # type: ignore[arg-type]
        self.images, self.sounds = batch["meta"].sees, batch["meta"].has_audio
        inputs = {
            name: value.to(self.device, self.dtype if value.is_floating_point() else None, non_blocking=True)
            for name, value in self._local_inputs(batch).items()
            if isinstance(value, Tensor) and name != "labels" and (self._accepts_any or name in self._accepted_names)
        }
        if keep is not None and self._selects_logits:
            inputs["logits_to_keep"] = keep.to(self.device)
        computing = nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)
        with self._separate_samples(original, inputs), computing:
            out = self.model(**inputs, **options, use_cache=False)
        logits = out.logits
        return (logits if keep is None or self._selects_logits else logits[:, keep.to(self.device)]), out

    def _with_videos_as_images(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with its videos converted to images, the input that the tower expects."""
        if "video_grid_thw" not in batch:
            return batch
        config, meta = self.model.config, batch["meta"]
        inputs = {name: per for name, per in meta.inputs.items() if per not in ("video", "patch")}
        steps = iter(batch["video_grid_thw"][:, 0].tolist())
        images = [count + sum(next(steps) for _ in range(n)) for count, n in zip(meta.images, meta.videos, strict=True)]
        merge = models.vision_of(config).merge  # type: ignore[arg-type]
        converted = models.as_images(batch, merge, config.image_token_id)  # type: ignore[arg-type,union-attr]
        return {**converted, "meta": replace(meta, images=tuple(images), inputs=inputs)}

    def _local_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a batch that this rank computes: its tokens and images of a pack shared by ranks."""
        if self.context is None or "boundaries" not in batch:
            return batch
        of_images = {name for name, per in batch["meta"].inputs.items() if per != "token"}
        part, images = self.part(batch), {"pixel_values", "image_grid_thw"} | of_images
        local = {name: x[:, part] if isinstance(x, Tensor) else x for name, x in batch.items() if name not in images}
        return local if self.image_sharding is None else {**local, **self.image_sharding.begin(batch)}

    @contextmanager
    def _separate_samples(self, batch: dict[str, Any], inputs: dict[str, Any]) -> Iterator[None]:
        """Context in which attention separates the samples of a pack. Adds their positions to the inputs."""
        if "boundaries" not in batch:
            yield
            return
        if self.packed is None:
            raise TrainError("a batch is a pack of samples, but this model was not set up for packs (data.packing)")
        edges, images = batch["boundaries"].edges, batch["meta"].images
        kinds, grid = batch.get("mm_token_type_ids"), batch.get("image_grid_thw")
        of = {"counts": batch["meta"].videos, **{name: batch[name] for name in models.VIDEO_INPUTS if name in batch}}
        positions = self.packed.positions(edges, batch["input_ids"], images, kinds, grid, of)
        inputs["position_ids"] = positions[..., self.part(batch)].to(self.device, non_blocking=True)
        try:
            with self.packed.forward(edges, positions):
                yield
        finally:
            if self.image_sharding is not None:
                self.image_sharding.end()


def real(batch: dict[str, Any]) -> Tensor | None:
    """Return a mask [B, T], 1 for tokens and 0 for padding, or None if all positions count as tokens, as in a
    placeholder batch without samples."""
    boundaries = batch.get("boundaries")
    if boundaries is None:
        mask: Tensor | None = batch.get("attention_mask")
        return mask
    if not boundaries.samples:
        return None
    return (torch.arange(boundaries.length) < boundaries.tokens).to(torch.int64)[None]


def log_probs(
    forward: Forward, head: ChunkedHead | None, batch: dict[str, Any], keep: Tensor, target: Tensor,
    temperature: float = 1.0, entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return log-probabilities and entropies, fp32 [B, P], on the device.

    The log-probabilities are log softmax(x / temperature) at `target` [B, P] (in host memory) for the positions `keep`
    [P], and 0 where the target is -100. With ``entropy`` the second result is the entropy of that distribution in
    nats, otherwise None. ``head`` computes them without full logits; if it is None, full logits are computed.
    """
    if head is not None:
        with head.log_probs(target, temperature, entropy) as by_head:
            logps = by_head.checked_losses(forward(batch, keep))
        return logps, by_head.entropy
    logits = forward(batch, keep)
    if entropy:
        return fp8.log_probs(logits, target, temperature=temperature, entropy=True)
    return fp8.log_probs(logits, target, temperature=temperature), None


def run_towers_on_dummy_inputs(model: nn.Module, family: models.Family, forward: Forward, world: World) -> None:
    """Run towers that are trained or sharded on a dummy image or sound in micro-batches without images or sounds, and
    run experts that only images reach on no tokens.

    Otherwise a rank without images would miss collectives that other ranks wait for, and a trained tower would have no
    gradients. The dummy does not affect amax histories, health figures or GEMM counts, and its gradients are zero.
    """
    trained = {family.component_of(n.rpartition(".")[0]) for n, p in model.named_parameters() if p.requires_grad}
    shared = world.size > 1
    if family.has_vision and (shared or trained & {"image_encoder", "image_projector"}):
        attach_dummy_image(model, family, enabled=lambda: not forward.images, guard=uncounted)
        attach_idle_experts(model, family, uncounted)
    if family.has_audio and (shared or trained & {"audio_encoder", "audio_projector"}):
        attach_dummy_sound(model, family, enabled=lambda: not forward.sounds, guard=uncounted)
