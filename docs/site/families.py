"""Writes docs/families.md, the table of models of images, sound and text: python docs/site/families.py"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers

from octavo import fp8, models
from octavo.base.model_families import RECORDS
from octavo.models.custom.register import is_own
from octavo.models.folder.folder import quiet
from octavo.models.forward.packed import why_not_packed
from octavo.models.forward.survey import COLUMNS, TRAINS, Surveyed, config_classes, summary, survey, whole
from octavo.parallel import Images, WorldError

PAGE = Path(__file__).resolve().parents[1] / "families.md"
HEAD = """# Families

Octavo describes a model by its structure: it asks the model for its decoder, output projection and towers, and
takes what lies beside them for the projector. So a family that nobody listed can be planned, and what breaks a rule is
refused by that rule. Whether a family trains is another question: its images or sounds must become batches here,
and its masks and positions must be known to the collation.

- **trains**: `octavo train` takes it; [the first table](#what-trains) says what of it was tried.
- **planned only**: `octavo plan` and `octavo.fp8.plan` show its layers by component; `octavo train` refuses it, for the
  reason given.
- **refused**: a rule did not find its parts. `octavo.fp8` plans it without components, by conventional names.
- **not built**: transformers could not build it from its default configuration, so nothing is known here; the folder of
  a released model may well be described.

The table is of transformers {version}, from default configurations on the meta device; `octavo doctor --families` makes
it for the installed version. Names are those of `named_modules`, as rules, `freeze` and plans use them; `model` as a
projector stands for single parameters of that module. What stands beside a vision tower takes sound. The
image token is the default configuration's.

{summary}

## What trains

Tried is what a checkpoint shows that `octavo tiny` writes: the family's architecture, tokens and template in small,
with random weights. Each trains 20 steps in FP8 in `tests/train/test_seeing.py` or `test_hearing.py`, the GEMMs counted
against the plan, and what it leaves in `hf/` gives the same logits to the classes named here: those of transformers, or
Octavo's where transformers has none (pages of [LLaVA-OneVision-1.5](onevision.md) and of [NVILA](nvila.md)). Packed
rows are held against single ones in `tests/models/test_packed.py`. Each may train on several ranks; tried there, with
their towers sharded, are those of `tests/parallel/test_towers.py`, and with shared rows those of
`tests/parallel/test_context_models.py`.

No released weights were read. For all of them a real folder's sizes, its processor's files and its chat template are
taken as the folder has them, and wait for one; the last column says what was inferred besides.

{trained}
## All of them

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


def page(found: Sequence[Surveyed]) -> str:
    """The page, of what a survey of the installed transformers found."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(_cells(one) for one in found)]
    trains = [one.model_type for one in found if one.here == TRAINS and (one.tower or one.audio)]
    trained = _table([HEADINGS, ["---"] * len(HEADINGS), *map(_trained, trains)])
    head = HEAD.format(version=transformers.__version__, summary=summary(found), trained=trained)
    return head + _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _trained(model_type: str) -> list[str]:
    """The line of a family that trains, told by the code that would refuse it."""
    with quiet():
        model = models.empty(whole(config_classes()[model_type]))
    family = models.describe(model)
    rows = fp8.describe_layers(model, family.components)
    inside = {row.component for row in rows if row.kind in ("linear", "experts")}
    parts = [part for part in family.components if part in inside]
    packed = why_not_packed(model)
    test = TESTS["image" if family.has_vision else "audio"]
    reader = "Octavo's" if is_own(model_type) else "transformers"
    told = "yes" if packed is None else f"no: {packed.removeprefix(f'model_type {model_type!r} ')}"
    shared = "no" if packed is not None else _shared(model, family)
    return [f"`{model_type}`", ", ".join(parts), told, shared, f"`{test}`", reader, RECORDS[model_type].unsourced]


def _shared(model: transformers.PreTrainedModel, family: models.Family) -> str:
    """Whether ranks may share a packed row (`parallel.context`)."""
    try:
        Images(model, family, None)
    except WorldError as error:
        return "no: " + str(error).partition(": ")[2].partition(". ")[0]
    return "yes"


def _cells(one: Surveyed) -> list[str]:
    *names, here = (cell.replace("|", "\\|").replace("*", "\\*") for cell in one.cells)
    return [*(", ".join(f"`{part}`" for part in name.split(", ")) if name else "" for name in names), here]


if __name__ == "__main__":
    PAGE.write_text(page(list(survey())), encoding="utf-8")
