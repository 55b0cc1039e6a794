"""Loads and evaluates a trained model: a run, a model folder or an adapter."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo import fp8, models, parallel
from octavo.base import accelerator
from octavo.base.recipe_specs import join_words
from octavo.config import Config
from octavo.config.sections.names import FROZEN
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.from_config import eval_set
from octavo.data.loaders.rows_from_config import check_seals
from octavo.train.artifacts.load_target import HIGH, Target, find_checkpoint, inspect_target, read_run_config
from octavo.train.errors import TrainError
from octavo.train.forward.evaluation import ANSWER_LOSS, evaluate, name_loss
from octavo.train.forward.forward import Forward, autocast_dtype
from octavo.train.setup.resolve_config import data_settings, load_processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Log = Callable[[str], None]
Progress = Callable[[int, int], None]
ExtraFigures = Callable[["PreTrainedModel", Any, Forward, Config], Mapping[str, float | None]]


def _no_extra_figures(
    model: PreTrainedModel, processor: Any, forward: Forward, cfg: Config
) -> Mapping[str, float | None]:
    return {}


def load_run(
    run_dir: str | Path, step: int | None = None, recipe: str | None = None, log: Log = warnings.warn
) -> tuple[PreTrainedModel, Any, Config]:
    """Return (model, processor, configuration) of a run, with FP8 applied as in training.

    step    the checkpoint to load; by default the newest complete one
    recipe  replaces the FP8 recipe of the whole model; "off" for high precision
    log     called with a line for each newer checkpoint that is damaged and was skipped

    Runs in one process. Raises TrainError if the directory is not a run or has no such checkpoint.
    """
    read_run_config(Path(run_dir))
    target = inspect_target(run_dir)
    model, processor, _ = target.open(step=step, recipe=recipe, log=log)
    return model, processor, target.run_config(recipe, "auto")


def evaluate_run(
    run_dir: str | Path, step: int | None = None, recipe: str | None = None, log: Log = warnings.warn
) -> dict[str, Any]:
    """Evaluate a run on its held-out data. Returns the figures of `evaluate` and the evaluated `step`; see `load_run`.

    Raises TrainError if the run's configuration has no held-out data.
    """
    read_run_config(Path(run_dir))
    return evaluate_target(inspect_target(run_dir), step=step, recipe=recipe, log=log)


def evaluate_target(
    target: Target,
    cfg: Config | None = None,
    *,
    load_in_fp8: str | Mapping[str, str] | None = None,
    recipe: str | None = None,
    backend: str = "auto",
    step: int | None = None,
    log: Log = lambda text: None,
    progress: Progress = lambda done, total: None,
    pieces: list[dict[str, Any]] | None = None,
    extra: ExtraFigures = _no_extra_figures,
) -> dict[str, Any]:
    """Evaluate a target. Returns the figures of `evaluate`, `fp8_gemms`, and the `step` of a run.

    cfg       the configuration whose data.eval is used; by default the run's
    progress  called with (batches done, number of batches)
    pieces    receives a record per answer, as in `evaluate`, with its `source` (`EvalSet.origin`)
    extra     computes additional figures from the opened model

    The other arguments are passed to `Target.open`. Raises TrainError if there is no held-out data, and the errors of
    `Target.open`.
    """
    cfg = _eval_config(target, cfg)
    step = _step(target, step, log)
    opened = target.open(load_in_fp8=load_in_fp8, recipe=recipe, backend=backend, step=step, log=log)
    log(f"{target.path}: {', '.join(opened.notes)}")
    result = _evaluate_model(target, cfg, opened.model, progress, pieces, extra)
    return result if step is None else {"step": step, **result}


def compare_bases(
    target: Target,
    cfg: Config | None = None,
    *,
    load_in_fp8: str | None = None,
    recipe: str | None = None,
    backend: str = "auto",
    step: int | None = None,
    log: Log = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Evaluate adapters on their FP8 base and on the same base in high precision.

    Returns {"bases": a row per base, "gap": FP8 minus high precision, "weights": distance of the codes from the
    folder's weights}. The bases are the FP8 base with its recipe, the same codes dequantized (to separate the errors of
    weights and activations), and the folder's weights. In "weights", `sqnr_db` is the geometric mean over all weights,
    and `relative` is |W - W'| / |W|. The arguments are as in `evaluate_target`.

    Raises TrainError for a target without adapters or without an FP8 base, and for a folder without high-precision
    weights.
    """
    if not target.lora:
        raise TrainError(f"{target.path} has no adapters, so there are no two bases to compare. Remove --base")
    if target.quantization is not None:
        raise TrainError(
            f"the base {target.base} has FP8 codes ({target.quantization}) and no high-precision weights to compare "
            "with. Evaluate it twice: unchanged, and with --base FOLDER, where FOLDER has the original weights"
        )
    kinds: str | Mapping[str, str] = load_in_fp8 or target.kinds or target.trained_kinds
    if not kinds or kinds == HIGH:
        raise TrainError(
            f"{target.path} was not trained on an FP8 base, and none is requested; choose the codes to compare with: "
            f"--load-in-fp8 {join_words(FROZEN, 'or')}"
        )
    from octavo import adapters

    cfg = _eval_config(target, cfg)
    as_trained = load_in_fp8 is None and bool(target.kinds)
    variants: list[tuple[str, Any, str | None]] = [("fp8", None if as_trained else kinds, recipe)]
    variants += [("fp8, dequantized", kinds, "off")] if recipe != "off" else []
    variants += [("high precision", HIGH, "off")]
    step = _step(target, step, log)
    rows, weights = [], None
    # One model at a time, because two may not fit.
    for name, load, variant_recipe in variants:
        opened = target.open(load_in_fp8=load, recipe=variant_recipe, backend=backend, step=step, log=log)
        log(f"{name}: {', '.join(opened.notes)}")
        rows.append({"base": name, **_evaluate_model(target, cfg, opened.model, progress)})
        if weights is None:
            dtype = next(p.dtype for p in opened.model.parameters() if p.is_floating_point())
            weights = adapters.base_errors(opened.model, models.load(target.base, dtype=dtype))
        del opened
    assert weights is not None
    finite = [row.sqnr for row in weights.rows if row.sqnr != float("inf")]
    first, last = rows[0], rows[-1]
    return {
        **({} if step is None else {"step": step}),
        "bases": rows,
        "gap": {key: first[key] - last[key] for key in ("loss", ANSWER_LOSS, "exact_match") if key in first},
        "weights": {
            "count": len(weights.rows),
            "relative": weights.relative,
            "sqnr_db": statistics.fmean(finite) if finite else None,
            "worst": {"name": weights.worst.name, "relative": weights.worst.relative},
        },
    }


def _step(target: Target, step: int | None, log: Log) -> int | None:
    """Return the step of the checkpoint that is opened, for a run; otherwise `step`."""
    if target.kind != "run":
        return step
    world = parallel.World(device=accelerator.default_device())
    return int(find_checkpoint(target.path, step, world, log).name.removeprefix("step_"))


def _eval_config(target: Target, cfg: Config | None) -> Config:
    """Return the configuration whose data.eval is used. Raises TrainError if there is none, and DataError if only one
    of model and data is sealed, or both with different keys."""
    chosen = cfg or target.cfg
    if chosen is None:
        raise TrainError(
            f"{target.path} is not a run, so it has no held-out data: give a configuration with data.eval, "
            "--config FILE.yaml"
        )
    if not chosen.data.eval:
        source = f"the run {target.path}" if cfg is None else "the given configuration"
        raise TrainError(f"{source} has no held-out data; give a configuration with data.eval: --config FILE.yaml")
    model = chosen.model.model_copy(update={"path": str(target.base)})
    held_out = chosen.data.model_copy(update={"train": []})
    check_seals(chosen.model_copy(update={"model": model, "lora": None, "data": held_out}))
    return chosen


def _evaluate_model(
    target: Target,
    cfg: Config,
    model: PreTrainedModel,
    progress: Progress,
    pieces: list[dict[str, Any]] | None = None,
    extra: ExtraFigures = _no_extra_figures,
) -> dict[str, Any]:
    processor = load_processor(cfg, target.base)
    evalset = eval_set(data_settings(cfg), processor)
    assert evalset is not None
    world = parallel.World(device=next(model.parameters()).device)
    in_fp32 = next(model.parameters()).dtype == torch.float32
    forward = Forward(model, world, autocast_dtype(target.cfg or cfg, world.device) if in_fp32 else None)
    with fp8.count_gemms() as counts:
        result = evaluate(model, _with_progress(evalset, progress), forward, world, pieces)
    result = name_loss(result, cfg.train.phase)
    for piece in pieces or ():
        piece["source"] = evalset.origin(piece["file"], piece["row"], piece["answer"])
    return {**result, **extra(model, processor, forward, cfg), "fp8_gemms": counts.total(fp8=True)}


def _with_progress(evalset: EvalSet, progress: Progress) -> Iterator[dict[str, Any]]:
    """Yield held-out batches, and report progress after each."""
    for done, batch in enumerate(evalset, 1):
        yield batch
        progress(done, len(evalset))
