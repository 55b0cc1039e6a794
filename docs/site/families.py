"""Writes docs/families.md, the table of models of images, sound and text: python docs/site/families.py"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers

from octavo import fp8, models
from octavo.base.model_families import RECORDS
from octavo.models.custom.register import is_custom
from octavo.models.folder.folder import silence_transformers
from octavo.models.forward.packed import why_not_packed
from octavo.models.forward.survey import (
    COLUMNS,
    TRAINS,
    FamilySupport,
    config_classes,
    full_default_config,
    summary,
    survey,
)
from octavo.parallel import ImageSharding, WorldError

PAGE = Path(__file__).resolve().parents[1] / "families.md"
HEAD = """# Families

Octavo describes a model by its structure: decoder, output projection and towers are taken from the model's own methods,
and the remaining modules are the projector. So unlisted families can be planned, and a model that breaks a rule is
refused with that rule. Training requires more: Octavo must be able to turn the family's images or sounds into
batches, with its masks and positions.

- **trains**: `octavo train` accepts it; [the first table](#what-trains) lists what was tested.
- **planned only**: `octavo plan` and `octavo.fp8.plan` show its layers by component; `octavo train` refuses it, for
  the reason in the table.
- **refused**: a rule did not find its parts. `octavo.fp8` plans it without components, by conventional names.
- **not built**: transformers cannot build it from its default configuration, so it could not be examined; a released
  model of the family may still be described from its folder.

The table is for transformers {version}, from default configurations on the meta device; `octavo doctor --families`
prints it for the installed version. Names are as in `named_modules`, rules, `freeze` and plans; the projector `model`
means single parameters of that module. Towers after a vision tower take audio. The image token is the default
configuration's.

{summary}

## What trains

Each family was tested with the checkpoint that `octavo tiny` writes: the family's architecture, tokens and template
with small sizes and random weights. It trains 20 steps in FP8 in `tests/train/test_seeing.py` or `test_hearing.py`,
where GEMMs are counted and compared with the plan, and its `hf/` gives the same logits in the classes named here:
transformers', or Octavo's if transformers has none (see [LLaVA-OneVision-1.5](onevision.md) and [NVILA](nvila.md)).
`tests/models/test_packed.py` compares packed rows with single ones. Every family may train on several ranks;
`tests/parallel/test_towers.py` tests sharded towers of several families, and `tests/parallel/test_context_models.py`
shared rows.

No released weights were read. The sizes, processor files and chat template of a released folder are used as they are,
and are untested; the last column lists facts that were inferred as well.

{trained}
## All families

"""

TESTS = {"image": "test_seeing", "audio": "test_hearing"}
HEADINGS = (
    "model type",
    "may run in FP8",
    "packs",
    "rows that ranks share",
    "tried in",
    "`hf/` read by",
    "inferred",
)


def page(families: Sequence[FamilySupport]) -> str:
    """The page, from a survey of the installed transformers."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(_cells(one) for one in families)]
    trains = [one.model_type for one in families if one.here == TRAINS and (one.tower or one.audio)]
    trained = _table([HEADINGS, ["---"] * len(HEADINGS), *map(_trained, trains)])
    head = HEAD.format(version=transformers.__version__, summary=summary(families), trained=trained)
    return head + _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _trained(model_type: str) -> list[str]:
    """The line of a family that trains, computed by the code that would refuse it."""
    with silence_transformers():
        model = models.empty(full_default_config(config_classes()[model_type]))
    family = models.describe(model)
    rows = fp8.describe_layers(model, family.components)
    inside = {row.component for row in rows if row.kind in ("linear", "experts")}
    parts = [part for part in family.components if part in inside]
    packed = why_not_packed(model)
    test = TESTS["image" if family.has_vision else "audio"]
    reader = "Octavo's" if is_custom(model_type) else "transformers"
    packs = "yes" if packed is None else f"no: {packed.removeprefix(f'model_type {model_type!r} ')}"
    shared = "no" if packed is not None else _shared(model, family)
    return [f"`{model_type}`", ", ".join(parts), packs, shared, f"`{test}`", reader, RECORDS[model_type].unsourced]


def _shared(model: transformers.PreTrainedModel, family: models.Family) -> str:
    """Whether ranks may share a packed row (`parallel.context`)."""
    try:
        ImageSharding(model, family, None)
    except WorldError as error:
        return "no: " + str(error).partition(": ")[2].partition(". ")[0]
    return "yes"


def _cells(one: FamilySupport) -> list[str]:
    *names, here = (cell.replace("|", "\\|").replace("*", "\\*") for cell in one.cells)
    return [*(", ".join(f"`{part}`" for part in name.split(", ")) if name else "" for name in names), here]


if __name__ == "__main__":
    PAGE.write_text(page(list(survey())), encoding="utf-8")
