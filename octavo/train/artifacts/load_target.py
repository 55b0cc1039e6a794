"""Identifies and opens a path: a run, a Hugging Face folder or a PEFT adapter.

    target = inspect_target("runs/lora")     # reads only configurations
    model, processor, notes = target.open()  # for evaluation or generation

=======  ===================  ======================================================================================
kind     identified by        opened as
=======  ===================  ======================================================================================
run      config.yaml          its model.path in FP8 as in training, with the newest complete checkpoint and the plan of
                              its step; a LoRA run as the base with its codes, and the trained adapters
folder   config.json          a model in high precision, or its FP8 codes with the recipe that fits them; `hf/` in a
                              run, and the outputs of octavo merge and export, are such folders
adapter  adapter_config.json  its base (named in that file, or given) with the adapters; `adapter/` in a run is one
=======  ===================  ======================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from octavo import checkpoint, fp8, models, parallel
from octavo.base import accelerator, safe_read
from octavo.base.recipe_specs import NAME_OF_KIND
from octavo.base.seal_note import check_adapter
from octavo.base.wording import count_noun
from octavo.checkpoint.run_state.files import read_state
from octavo.config import Config, load_config, override
from octavo.fp8.weights import FROZEN, codes_of_frozen, frozen_weights
from octavo.models.folder.folder import describe_folder, find_pickles, read_json
from octavo.models.folder.quantization import Quantization, read_quantization
from octavo.train.errors import TrainError
from octavo.train.forward import critic
from octavo.train.forward.forward import model_dtype
from octavo.train.run_dir import input_fingerprints, run_dir
from octavo.train.setup import frozen_base, planning
from octavo.train.setup.resolve_config import load_processor, random_init, resolve_from_checkpoint
from octavo.train.setup.resume import scaling_of
from octavo.train.step.precision_schedule import PrecisionSchedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Log = Callable[[str], None]
Kind = Literal["run", "folder", "adapter"]

MODEL, ADAPTER, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.safetensors"
_EXPECTED_TYPES = {run_dir.CONFIG: "a file", run_dir.CHECKPOINTS: "a folder", MODEL: "a file", ADAPTER: "a file"}
#: a value of `load_in_fp8`: high precision, dequantizing a folder's codes
HIGH = "off"


class OpenedTarget(NamedTuple):
    """A model in eval mode, its processor, and lines about its precision and other things that a user should know."""

    model: PreTrainedModel
    processor: Any
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """The result of `inspect_target`.

    path          as given
    kind          run, folder or adapter
    base          the Hugging Face folder with configuration, tokenizer and weights (for a full run: its model.path)
    adapter       the PEFT folder, for an adapter
    cfg           the configuration, for a run
    quantization  quantization of the base on disk, or None for high precision
    moved         True if a different base from the one in training was given
    trained_kinds component -> kind of the codes with which an adapter in a run directory was trained
    random        (seed, standard deviation or None) of random initial weights, if the base has none
    notes         lines about the choice of base
    """

    path: Path
    kind: Kind
    base: Path
    adapter: Path | None = None
    cfg: Config | None = None
    quantization: Quantization | None = None
    moved: bool = False
    trained_kinds: Mapping[str, str] = field(default_factory=dict)
    random: tuple[int, float | None] | None = None
    notes: tuple[str, ...] = ()

    @property
    def lora(self) -> bool:
        """True for a base with adapters."""
        return self.kind == "adapter" or (self.cfg is not None and self.cfg.lora is not None)

    @property
    def kinds(self) -> dict[str, str]:
        """Component -> kind of the codes to which the run's configuration quantizes the base at load."""
        return {} if self.cfg is None else self.cfg.model.load_in_fp8.kinds

    def open(
        self,
        *,
        load_in_fp8: str | Mapping[str, str] | None = None,
        recipe: str | None = None,
        backend: str = "auto",
        step: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        log: Log = lambda text: None,
    ) -> OpenedTarget:
        """Return (model, processor, notes).

        load_in_fp8  row, block or tensor (or component -> kind) to quantize the base while it is read; "off" to
                     dequantize its codes. By default as in the run; a folder is not changed
        recipe       an FP8 recipe for the whole model; "off" to dequantize frozen codes at each use. By default the
                     recipe of the run, or the recipe that fits the codes of a folder
        backend      the kernels of the recipe's GEMMs: auto, or a name such as reference
        step         the checkpoint of a run; by default the newest complete one
        device       by default the GPU if there is one
        dtype        the dtype of all non-FP8 tensors. By default the dtype of the run; for a folder BF16 on a GPU and
                     fp32 on a CPU
        log          called with a line about events such as skipped damaged checkpoints

        Raises TrainError, ModelError, AdapterError, CheckpointError, PlanError.
        """
        device = torch.device(device or accelerator.default_device())
        if self.cfg is not None:
            return self._open_run(load_in_fp8, recipe, backend, step, device, dtype, log)
        if step is not None:
            raise TrainError(f"step {step} chooses a checkpoint of a run, but {self.path} is not a run directory")
        dtype = dtype or accelerator.autocast_dtype(device) or torch.float32
        model = self._load(dtype, device, load_in_fp8 or None, log)
        known = () if self.adapter is not None and load_in_fp8 else self.notes  # the notes recommend load_in_fp8
        notes = [*known, *_convert(model, recipe, backend)]
        if self.adapter is not None:
            from octavo import adapters

            adapters.load(model, self.adapter, log)
        model.eval()
        return OpenedTarget(model, models.load_processor(self.base), (*notes, *_ignored(model)))

    def _load(
        self, dtype: torch.dtype, device: torch.device, load_in_fp8: str | Mapping[str, str] | None, log: Log
    ) -> Any:
        if self.random is not None:
            return models.init_model(self.base, dtype, device, *self.random)
        high = load_in_fp8 == HIGH
        kinds = None if high else load_in_fp8
        return models.load(self.base, dtype=dtype, device=device, load_in_fp8=kinds, keep_fp8=not high, log=log)

    def _open_run(
        self,
        load_in_fp8: str | Mapping[str, str] | None,
        recipe: str | None,
        backend: str,
        step: int | None,
        device: torch.device,
        dtype: torch.dtype | None,
        log: Log,
    ) -> OpenedTarget:
        """Open a run as in training; with another base or precision, convert it like any base with codes."""
        if load_in_fp8 is not None and not self.lora:
            raise TrainError(
                f"load_in_fp8 quantizes a frozen base, but {self.path} trained all weights; choose its precision by "
                "the recipe, or octavo export it with --format fp8 and use that folder"
            )
        cfg, world = resolve_from_checkpoint(self.run_config(recipe, backend)), parallel.World(device=device)
        path = find_checkpoint(self.path, step, world, log)
        before = read_state(path)["counters"]
        if not self.moved:  # another tokenizer or processor would change the model's inputs
            input_fingerprints.check_same_folder(
                before.get("model"), input_fingerprints.folder_fingerprints(self.base), path, str(self.base)
            )
        as_trained = load_in_fp8 is None and not self.moved
        wanted = dtype or model_dtype(cfg)
        if as_trained:
            plan, family, _ = planning.plan_for(cfg, saved=self.path / run_dir.PLAN if recipe is None else None)
            if recipe is None:  # the plan at that step
                plan = PrecisionSchedule.from_counters(cfg, planning.make_schedule(cfg, plan), before).plan_at(
                    before["step"]
                )
            codes = None if self.kinds or frozen_base.keeps_codes(cfg) else HIGH
            model = self._load(wanted, device, self.kinds or codes, log)
            frozen_base.freeze(model, family, cfg)
            fp8.apply(model, plan)
            notes = [_describe_plan(model, plan)]
        else:
            model = self._load(wanted, device, load_in_fp8 or None, log)
            family = models.describe(model.config)
            model.requires_grad_(False)
            notes = _convert(model, recipe, backend)
        if cfg.lora is not None:
            from octavo import adapters

            adapters.attach(model, family, cfg.lora, seed=cfg.run.seed)
            # Adapters only fit the base on which they were trained.
            if as_trained and dtype is None and before.get("base"):
                digests = frozen_base.compute_digests(model, world)
                base = frozen_base.FrozenBase.from_model(model, digests, world)
                frozen_base.check_same_base(before["base"], base.fingerprint, path, str(self.base))
        restored = checkpoint.load(
            path, model=model, optimizer=None, world=world, may_be_missing=critic.is_critic_parameter
        )
        histories = scaling_of(restored.extra)
        if recipe is None and histories and as_trained:
            fp8.load_scaling_state(model, histories)
        model.eval()
        processor = load_processor(cfg, self.base)
        return OpenedTarget(model, processor, (f"step {restored.step}", *notes, *self.notes, *_ignored(model)))

    def run_config(self, recipe: str | None, backend: str) -> Config:
        """Return the run's configuration, with the given recipe and backend."""
        assert self.cfg is not None
        cfg = self.cfg
        if recipe == "off":  # also drops formats, components and rules
            return cfg.model_copy(update={"fp8": type(cfg.fp8)(recipe="off")})
        if backend != "auto" and recipe is None and planning.has_open_recipes(cfg):
            raise TrainError(
                f"the plan of {self.path} was measured or comes from a file, including backends; name a recipe with "
                f"the backend {backend}"
            )
        changes = [] if recipe is None else [f"fp8.recipe={recipe}", "fp8.plan=null"]
        changes += [] if backend == "auto" else [f"fp8.backend={backend}"]
        return override(cfg, changes) if changes else cfg


def inspect_target(path: str | Path, base: str | Path | None = None) -> Target:
    """Identify a path as a run, a Hugging Face folder or an adapter, without reading weights.

    base  replaces the base that a LoRA run or an adapter names

    Raises TrainError for any other path, weights in pickles, an adapter whose base is missing or sealed with a
    different key (`octavo seal`), and a base given without adapters. Raises ModelError for an unreadable configuration.
    """
    # An adapter file next to other weights is ambiguous (a merge in progress, a copied folder), so it is rejected.
    folder = Path(path)
    if not folder.is_dir():
        raise TrainError(_describe_missing_folder(folder))
    for name, wanted in _EXPECTED_TYPES.items():
        if (what := _file_type(folder / name)) not in (None, wanted):
            raise TrainError(f"{folder / name} is {what}, where {wanted} belongs. Put the right one in its place")
    has_adapter = (folder / ADAPTER).is_file()
    if (folder / run_dir.CONFIG).is_file():
        target = _inspect_run(folder, base)
    elif has_adapter and not any(p.name != ADAPTER_WEIGHTS for p in folder.glob("*.safetensors")):
        target = _inspect_adapter(folder, base)
    elif has_adapter and (folder / MODEL).is_file():
        raise TrainError(
            f"{folder} holds a model ({MODEL}, weights) and an adapter ({ADAPTER}), so it is ambiguous. Move one of "
            "them to a separate folder"
        )
    elif (folder / MODEL).is_file():
        if base is not None:
            raise TrainError(f"a base was given ({base}), but {folder} is a whole model: only adapters have a base")
        target = Target(folder, "folder", folder)
    else:
        raise TrainError(_describe_unknown_folder(folder))
    if (adapter := target.adapter or (folder / "adapter" if target.moved else None)) is not None and adapter.is_dir():
        check_adapter(adapter, target.base, TrainError)
    models.read_config(target.base)  # raises for a wrong config.json, before other files are blamed for it
    return replace(target, quantization=read_quantization(target.base))


def _file_type(path: Path) -> str | None:
    """Return the type of the file at a path in words, or None if there is none."""
    try:
        return safe_read.describe_file_type(path) or "a file"
    except OSError:
        return "a link that leads nowhere" if path.is_symlink() else None


def read_run_config(directory: Path) -> Config:
    """Return the configuration of a run. Raises TrainError if the directory is not a run."""
    file = directory / run_dir.CONFIG
    if not file.is_file():
        raise TrainError(
            f"{directory} is not a run directory: it has no {run_dir.CONFIG}. Name one that octavo train wrote"
        )
    return load_config(file)


def find_checkpoint(directory: Path, step: int | None, world: parallel.World, log: Log) -> Path:
    """Return the checkpoint of a run at `step`, or the newest complete one. Raises TrainError if there is none."""
    folder = directory / run_dir.CHECKPOINTS
    steps = checkpoint.steps(folder)
    named = folder / f"step_{step}"
    if step is not None and (named / "state.json").is_file():  # an explicitly named checkpoint may be a link
        if bad := checkpoint.why_misplaced(named, checkpoint.read_state(named)):
            raise TrainError(f"{bad}. Name a step whose checkpoint the run wrote: {', '.join(map(str, steps))}")
        return named
    if not steps:
        raise TrainError(f"the run {directory} has no checkpoint yet; it must reach run.save_every or its end first")
    if step is None:
        newest = checkpoint.latest(folder, world, log)
        assert newest is not None
        return newest
    raise TrainError(f"the run {directory} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")


def make_fitting_policy(model: nn.Module, family: models.Family, backend: str = "auto") -> fp8.Policy | None:
    """Return the policy that uses the codes of every frozen layer directly and keeps other layers in high precision.

    Returns None for a model without frozen weights. A component gets the recipe of most of its codes; rules cover the
    layers with other codes and layers in high precision.
    """
    kinds = {spec.block: kind for kind, spec in FROZEN.items()}
    wanted: dict[str, str] = {}
    for name, weight in frozen_weights(model):
        kind = kinds.get(codes_of_frozen(weight).spec.block)
        if kind is not None:
            wanted[name.removesuffix(".weight")] = NAME_OF_KIND[kind]
    if not wanted:
        return None
    by_component: dict[str, list[tuple[str, str]]] = {}
    for row in fp8.describe_layers(model, family.components):
        by_component.setdefault(row.component, []).append((row.name, wanted.get(row.name, "off")))
    components, rules = {}, []
    for component, rows in by_component.items():
        if component not in models.WITHOUT_HEAD:
            continue
        recipes = [recipe for _, recipe in rows]
        most_common = max(sorted(set(recipes)), key=recipes.count)
        components[component] = fp8.ComponentPolicy(recipe=most_common)
        rules += [fp8.Rule(name, recipe=recipe) for name, recipe in rows if recipe != most_common]
    return fp8.Policy(recipe="off", components=components, rules=tuple(rules), backend=backend)


def _convert(model: PreTrainedModel, recipe: str | None, backend: str) -> list[str]:
    """Plan and apply a recipe, or the one that fits the model's codes; return lines about it."""
    family = models.describe(model.config)
    policy = (
        make_fitting_policy(model, family, backend) if recipe is None else fp8.Policy(recipe=recipe, backend=backend)
    )
    if policy is None or recipe == "off":
        return [_describe_plan(model, None)]
    plan = fp8.plan(model, policy, family.components)
    fp8.apply(model, plan)
    return [_describe_plan(model, plan)]


def _ignored(model: PreTrainedModel) -> tuple[str, ...]:
    """Return a note about generation settings that have no effect, because answers and evaluations are greedy."""
    note = models.ignored_settings(model)
    return () if note is None else (note,)


def _describe_plan(model: nn.Module, plan: fp8.Plan | None) -> str:
    """Return a line about the precision of a model."""
    codes = sum(1 for _ in frozen_weights(model))
    rows = [] if plan is None else [row for row in plan.rows if row.recipe is not None and row.backend is not None]
    if not rows:
        return f"{count_noun(codes, 'FP8 weight')}, dequantized where they are used" if codes else "high precision"
    used = sorted({f"{r.recipe.name} on {r.backend.backend.name}" for r in rows if r.recipe and r.backend})
    frozen = f", {count_noun(codes, 'weight')} frozen codes" if codes else ""
    return f"{count_noun(len(rows), 'layer')} in FP8 ({', '.join(used)}){frozen}"


def _inspect_run(folder: Path, base: str | Path | None) -> Target:
    cfg = read_run_config(folder)
    if base is None:
        return Target(folder, "run", Path(cfg.model.path), cfg=cfg, random=random_init(cfg))
    if cfg.lora is None:
        raise TrainError(
            f"a base was given ({base}), but the run {folder} trained all weights: only adapters have a base"
        )
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": str(_base_folder(base, folder))})})
    return Target(folder, "run", Path(cfg.model.path), cfg=cfg, moved=True)


def _inspect_adapter(folder: Path, base: str | Path | None) -> Target:
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = find_pickles(folder)
        raise TrainError(
            f"{folder} has {ADAPTER} but no {ADAPTER_WEIGHTS}"
            + (
                f", only {pickled[0]}: a pickle can run code when it is read, so Octavo only reads safetensors. Save "
                "the adapter with save_pretrained (safetensors is its format)"
                if pickled
                else ": it is not a complete PEFT adapter. Save or download it again"
            )
        )
    # The base is, in this order: `base`, the path in the file (also relative to the folder, for copies), and the model
    # of the run that contains the adapter.
    named = read_json(folder / ADAPTER).get("base_model_name_or_path")
    run = folder.resolve().parent
    inside = read_run_config(run) if (run / run_dir.CONFIG).is_file() else None
    notes, trained_kinds = [], {} if inside is None else inside.model.load_in_fp8.kinds
    if trained_kinds:
        kinds = sorted({NAME_OF_KIND[kind] for kind in trained_kinds.values()})
        fix = f"--load-in-fp8 {kinds[0]}" if list(trained_kinds) == ["foundation"] else f"naming the run {run}"
        notes.append(f"this adapter was trained on {' and '.join(kinds)} codes of its base: {fix} uses them again")
    if base is not None:
        return Target(folder, "adapter", _base_folder(base, folder), folder, moved=True, notes=tuple(notes))
    places = [] if not isinstance(named, str) or not named else [Path(named), folder / named]
    places += [] if inside is None else [Path(inside.model.path)]
    for place in places:
        if (place / MODEL).is_file():
            return Target(folder, "adapter", place, folder, trained_kinds=trained_kinds, notes=tuple(notes))
    raise TrainError(
        f"the base of the adapter {folder} is missing: its {ADAPTER} names {named!r}, which is not a Hugging Face "
        "folder on this machine. Download it, and name it with --base FOLDER"
    )


def _base_folder(base: str | Path, of: Path) -> Path:
    folder = Path(base)
    if not (folder / MODEL).is_file():
        state = f"is {describe_folder(folder)}" if folder.is_dir() else "is not a folder."
        raise TrainError(f"{folder} was given as the base of {of}, but {state} Name a local Hugging Face folder.")
    return folder


def _describe_missing_folder(path: Path) -> str:
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return f"{path} is a configuration; name its run directory (run.dir)"
    if path.is_file():
        return f"{path} is a file; name the folder of a run, of a Hugging Face checkpoint or of a PEFT adapter"
    named = str(path).count("/") == 1 and not path.parent.exists()  # such as Qwen/Qwen3-VL-8B-Instruct
    download = ". Octavo only reads local folders: download the model first" if named else ""
    return f"there is no folder {path}; name a run directory, a Hugging Face folder or a PEFT adapter{download}"


def _describe_unknown_folder(folder: Path) -> str:
    """Return what an unsupported folder seems to be, and how to use it."""
    names = sorted(p.name for p in folder.iterdir())
    about = f"{folder} is not a run directory, a Hugging Face folder or a PEFT adapter"
    lacks = f"it has no {run_dir.CONFIG}, {MODEL} is missing, and so is {ADAPTER}"
    if "state.json" in names and ".metadata" in names:
        run = folder.resolve().parent.parent
        step = folder.name.removeprefix("step_")
        return f"{about} but a checkpoint of the run {run}; name the run, and --step {step}"
    if ".metadata" in names:
        return f"{about} but a DCP checkpoint (.metadata); make a Hugging Face folder of it: octavo convert dcp_to_hf"
    if checkpoint.steps(folder):
        return f"{about} but the folder of a run's checkpoints; name the run, {folder.resolve().parent}"
    if any(n.endswith(".safetensors") for n in names):
        return f"{about}: there are weights, but {lacks}. Copy the configuration from where the model came"
    if not names:
        return f"{about}: it is empty"
    visible = [n for n in names if not n.startswith(".")] or names
    return f"{about}: {lacks}. It holds {', '.join(visible[:4])}{' ...' if len(visible) > 4 else ''}"
