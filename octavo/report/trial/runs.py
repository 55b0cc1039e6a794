"""The runs of a trial in order: each has a name, a kind and a configuration.

High precision, the same with other seeds, each FP8 recipe, the ablation of savings, pairs of seeds, forks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from octavo.base.recipe_specs import RECIPES_OF_KIND
from octavo.config import COMPONENTS, RECIPES, Config, Fp8Section, override
from octavo.config.sections.rl import BEYOND_SFT
from octavo.report.evidence.claims import MIN_FORK_STEPS
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trial_claims import FORKS, SEEDS, fork_step
from octavo.report.evidence.trial_spec import Run
from octavo.report.trial.memory_savings import ablation, with_plain_storage, without_savings

HIGH = "high precision"
_BARE = {"health_every": 0, "gain_steps": 0, "hf": False, "tensorboard": False, "trackers": ()}


def make_runs(
    cfg: Config,
    recipes: Sequence[str] | None,
    directory: Path,
    savings: bool = True,
    forks: int = 0,
    seeds: int = 1,
    fp8_components: str = "",
    claims: Sequence[str] = (),
) -> list[Run]:
    """Return the runs of a trial in order; raises ``ReportError`` if none of them would be FP8. ``fp8_components``
    names the components in FP8 if the configuration has more of them, ``claims`` the claims to judge (none: all)."""
    own_name = own_recipe(cfg)
    if recipes is None:
        if own_name == "off":
            raise ReportError(
                "the configuration has fp8.recipe: off, so there is no FP8 to compare with high precision. Set "
                f"fp8.recipe, or name recipes to try: {', '.join(r for r in RECIPES if r != 'off')}"
            )
        recipes = [own_name]
    unknown = [r for r in recipes if r == "off" or (r not in (*RECIPES, "auto") and r != own_name)]
    if unknown or not recipes:
        known = ", ".join(r for r in RECIPES if r != "off")
        problem = f"unknown FP8 recipe {', '.join(map(repr, unknown))}" if unknown else "no recipe is named"
        raise ReportError(f"{problem}; choose one or more of {known}")
    plain = high_precision_config(cfg)
    seed, begins = cfg.run.seed, fork_step(cfg.train.total_steps)
    # The checkpoint is kept even without forks, so that forks can be added later without training high precision again.
    may_fork = cfg.train.phase not in BEYOND_SFT and (not claims or FORKS in claims)
    forkable = may_fork and cfg.train.total_steps - begins >= MIN_FORK_STEPS
    milestones = (begins,) if forks or forkable else ()
    forkable_cfg = plain.model_copy(update={"run": plain.run.model_copy(update={"milestones": milestones})})
    reference = _make_run(forkable_cfg, directory, "high-precision", HIGH, "reference", seed)
    other_seeds = range(seed + 1, seed + max(seeds, 2 if not claims or SEEDS in claims else 1))
    runs = [
        reference,
        *(
            _make_run(
                plain, directory, f"high-precision-seed-{other_seed}", f"{HIGH}, seed {other_seed}", "noise", other_seed
            )
            for other_seed in other_seeds
        ),
    ]
    names = list(dict.fromkeys(recipes))
    for name in names:
        chosen = cfg if name == own_name else with_recipe(cfg, name)
        for number, (description, setting) in enumerate(ablation(chosen) if savings and len(names) == 1 else ()):
            runs.append(_make_run(setting, directory, f"saving-{number}", description, "saving", seed))
        fp8 = _make_run(
            chosen,
            directory,
            f"fp8-{name}{fp8_components and f'-{fp8_components}'}",
            f"FP8 {name}{fp8_components and f' of {fp8_components}'}",
            "fp8",
            seed,
        )
        runs.append(fp8)
        for other_seed in range(seed + 1, seed + seeds):
            run = _make_run(
                chosen,
                directory,
                f"{fp8.name}-seed-{other_seed}",
                f"{fp8.label}, seed {other_seed}",
                "seed",
                other_seed,
            )
            runs.append(replace(run, of=fp8.name))
        runs += [_fork_run(reference, fp8, with_plain_storage(chosen), number, directory) for number in range(forks)]
    # The high-precision fork with the reference's seed is the reference itself, if it logs every step.
    first = 1 if cfg.run.log_every == 1 else 0
    return runs + [_fork_run(reference, None, plain, number, directory) for number in range(first, forks)]


def _fork_run(reference: Run, fp8: Run | None, cfg: Config, number: int, directory: Path) -> Run:
    """Return a run that continues the checkpoint of the reference at two thirds, with data in the order of another
    seed."""
    begins = reference.cfg.run.milestones[0]
    checkpoint = Path(reference.cfg.run.dir).resolve() / "milestones" / f"step_{begins}"
    bare = _BARE | {"fork": str(checkpoint), "start_from": None}
    cfg = cfg.model_copy(
        update={
            "run": cfg.run.model_copy(update=bare | {"milestones": (), "save_every": 0, "keep": 1, "log_every": 1}),
            "data": cfg.data.model_copy(update={"eval": ()}),
            "train": cfg.train.model_copy(update={"stages": ()}),  # a fork continues the last stage
        }
    )
    name, label = ("high-precision", HIGH) if fp8 is None else (fp8.name, fp8.label)
    seed = reference.cfg.run.seed + number
    run = _make_run(cfg, directory, f"fork-{number}-{name}", f"{label}, fork {number + 1}", "fork", seed)
    return replace(run, of="" if fp8 is None else fp8.name, number=number, begins=begins)


def cell_run(cfg: Config, directory: Path, parts: Sequence[str], seed: int) -> Run:
    """Return a cell of a factorial trial: FP8 in these components; only its held-out figures are used."""
    bare = cfg.model_copy(update={"run": cfg.run.model_copy(update=_BARE)})
    name = f"cell-{'+'.join(parts)}"
    run = _make_run(bare, directory, f"{name}-seed-{seed}", f"FP8 in {' + '.join(parts)}, seed {seed}", "cell", seed)
    return replace(run, factors=tuple(parts))


def high_precision_config(cfg: Config) -> Config:
    """Return the configuration to compare FP8 with: no FP8 and no savings, in BF16 if the configured model is BF16."""
    return without_savings(cfg).model_copy(update={"fp8": Fp8Section(recipe="off")})


def with_recipe(cfg: Config, name: str) -> Config:
    """Set the recipe wherever no other is set explicitly. A base that is quantized while loading gets codes of this
    recipe, or stays in high precision if the recipe has none."""
    kind = next((kind for kind, recipes in RECIPES_OF_KIND.items() if name in recipes), None)
    kinds = {
        part: kind if (settings := getattr(cfg.fp8, part)) is None or settings.recipe is None else was
        for part, was in cfg.model.load_in_fp8.kinds.items()
    }
    listed = ", ".join(f"{part}: {kind or 'null'}" for part, kind in kinds.items())
    base = [f"model.load_in_fp8={{{listed}}}"] if kinds else []
    return override(cfg, [f"fp8.recipe={name}", "fp8.plan=null", *base])


def own_recipe(cfg: Config) -> str:
    """Return the recipe of a configuration; "by-plan" if a plan file decides; "by-component" if only components or
    rules set one; or off."""
    fp8 = cfg.fp8
    if fp8.plan is not None:
        return "by-plan"
    if fp8.recipe != "off":
        return fp8.recipe
    parts = [*(getattr(fp8, name) for name in COMPONENTS), fp8.lm_head, *fp8.rules]
    return "by-component" if any(p and p.recipe not in (None, "off") for p in parts) else "off"


def _make_run(cfg: Config, directory: Path, name: str, label: str, kind: str, seed: int) -> Run:
    fixed_run_keys = {"dir": str(directory / "arms" / name), "resume": "auto", "save_states": True, "seed": seed}
    return Run(name, label, kind, cfg.model_copy(update={"run": cfg.run.model_copy(update=fixed_run_keys)}))
