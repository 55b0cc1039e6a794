"""A replica: the trainer's model without its trainer, and the generation engine on it.

It reads the model's folder as the trainer did, and receives the weights of each version. What it computes depends on
the configuration, the plan and these weights alone, so every replica generates the same bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo import fp8, generation, models
from octavo.base import accelerator
from octavo.config import Config, load_config_text
from octavo.fp8.observe import uncounted
from octavo.generation import Completion, GenerationError, Prompt, Sampling
from octavo.generation.engines import Manifest, Pieces, StaleWeightsError, read_tensors
from octavo.generation.engines.manifest import digest_of, sha256_of
from octavo.parallel import World
from octavo.rl.fleet.tensors import load_rollout_tensor, rollout_tensors
from octavo.rl.rollout.rollout import USABLE_SHARE, slots_for
from octavo.train.forward import attention_kernel
from octavo.train.forward.forward import autocast_dtype, model_dtype
from octavo.train.setup import frozen_base, planning
from octavo.train.setup.model_setup import assemble_model
from octavo.train.setup.resolve_config import load_processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Work = tuple[Sequence[Prompt], Sampling, int]
"""Prompts, sampling settings, and the number of completions of each prompt."""


@dataclass(frozen=True)
class ReplicaSettings:
    """What a replica is built from: the run's configuration as YAML, its plan.json, the number of CPU threads, and the
    share of an accelerator's memory that it may use."""

    config: str
    plan: str
    threads: int
    share: float = 1.0


class Replica:
    """The engine of one process. It refuses to generate before it has weights, and for a version that it does not
    have. Raises the errors of loading a model."""

    def __init__(self, settings: ReplicaSettings) -> None:
        torch.set_num_threads(settings.threads)
        cfg = load_config_text(settings.config)
        assert cfg.rl is not None
        self.rl = cfg.rl
        self.device = accelerator.default_device()
        self.model = build_model(cfg, settings.plan, self.device)
        self.engine = generation.Engine(
            self.model,
            load_processor(cfg),
            generation.Context(autocast_dtype(cfg, self.device)),
            slots=1,  # each call sets it
            kv=cfg.rl.kv,
            pages=cfg.rl.pages,
            invariant=cfg.rl.invariant,
        )
        self._targets: dict[str, Tensor] = dict(rollout_tensors(self.model))
        self._hashes: dict[str, str] = {}
        self._version: int | None = None
        self._memory = _memory_for_rollouts(self.device, settings.share)

    def update(self, version: int, manifest: Manifest, pieces: Pieces) -> str:
        """Take the weights of a version. Returns the digest of all tensors as this replica has them. Raises
        GenerationError if they differ from the manifest, fit the model badly or are damaged; the replica then has no
        version, and refuses to generate."""
        self._version = None
        for entry, tensor in read_tensors(manifest, pieces):
            try:
                load_rollout_tensor(self._targets, entry.name, tensor)
            except ValueError as error:
                raise GenerationError(f"the weights do not fit this replica's model: {error}.") from error
            self._hashes[entry.name] = entry.sha256
        fp8.invalidate(self.model)
        for name, tensor in self._targets.items():  # from the model's folder: hashed once
            if name not in self._hashes:
                self._hashes[name] = sha256_of(tensor)
        digest = digest_of(_line(name, tensor, self._hashes[name]) for name, tensor in self._targets.items())
        if digest != manifest.digest:
            expected = {entry.name: entry.sha256 for entry in manifest.entries}
            names = dict.fromkeys((*expected, *self._targets))
            name = next((n for n in names if self._hashes.get(n) != expected.get(n)), "the shape of a tensor")
            raise GenerationError(
                f"a replica has other weights than the trainer: {name} differs. Check that model.path has the same "
                "files on every node, and that every node has the same versions of octavo and torch."
            )
        self._version = version
        return digest

    def generate(self, version: int, work: Work) -> tuple[int, list[Completion]]:
        """Return the version of the weights, and the completions of a chunk. Raises StaleWeightsError for another
        version."""
        if self._version != version:
            has = "none" if self._version is None else f"version {self._version}"
            raise StaleWeightsError(f"asked for weights of version {version}, and this replica has {has}")
        prompts, sampling, group = work
        section = self.rl.model_copy(update={"group": group})
        self.engine.slots = slots_for(self.engine, prompts, sampling, section, self._memory)
        with uncounted():
            completions = self.engine.generate(prompts, sampling, group)
        return version, completions


def build_model(cfg: Config, plan_text: str, device: torch.device) -> PreTrainedModel:
    """Return the model of a run for rollouts only. With adapters it is the run's own, whose base is frozen; without,
    FP8 layers are codes without weights. Raises the errors of loading a model and a plan."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        file.write_text(plan_text, encoding="utf-8")
        if cfg.lora is None:
            model = frozen_base.load_as_values(cfg, model_dtype(cfg), device)
            frozen_base.freeze_copy(model, cfg, file, models.describe(model).components)
        else:
            base, family = planning.meta_model(cfg)
            without_adapter = cfg.model_copy(update={"lora": cfg.lora.model_copy(update={"adapter": None})})
            plan = fp8.load_plan(file, base, family.components, other_machine=True)
            model, _, _ = assemble_model(without_adapter, device, plan, family)
            model.requires_grad_(False).eval()
    attention_kernel.use_kernels(model, attention_kernel.decide(cfg, World(device=device), None))
    return model


def _memory_for_rollouts(device: torch.device, share: float) -> int | None:
    """Return the bytes for keys and values, from the size of the device: free memory would differ from start to start,
    and with it the number of sequences at a time and the last bits of their results. None where a device does not
    report its size, such as the CPU."""
    total = accelerator.properties(device)["memory_bytes"] if accelerator.has_own_memory(device) else None
    return None if total is None else int(USABLE_SHARE * share * total) - (accelerator.allocated_bytes(device) or 0)


def _line(name: str, tensor: Tensor, sha256: str) -> tuple[str, str, Sequence[int], str]:
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), sha256
