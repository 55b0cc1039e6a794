"""Writes docs/families.md, the table of models of images, sound and text: python docs/site/families.py"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers

from octavo.models.survey import COLUMNS, TRAINS, Surveyed, summary, survey

PAGE = Path(__file__).resolve().parents[1] / "families.md"
HEAD = """# Families

Octavo describes a model by its structure: it asks the model for its decoder, output projection and towers, and
takes what lies beside them for the projector. So a family that nobody listed can be planned, and what breaks a rule is
refused by that rule. Whether a family trains is another question: its images or sounds must become batches here,
and its masks and positions must be known to the collation.

- **trains**: `octavo train` takes it. Those of images train in FP8 in `tests/train/test_seeing.py`, that
  of sound in `tests/train/test_hearing.py`, from the small
  checkpoints with random weights that `octavo tiny` writes: {tiny}.
  What a released folder brings besides (its sizes, its processor's files, its chat template) is read from the folder,
  and was not tried for this table. transformers has no model of `llavaonevision1_5`, `nvila` and
  `nvila_lite`: Octavo does (pages of [the first](onevision.md) and of [NVILA](nvila.md)).
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

"""


def page(found: Sequence[Surveyed]) -> str:
    """The page, of what a survey of the installed transformers found."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(_cells(one) for one in found)]
    tiny = ", ".join(f"`{one.model_type}`" for one in found if one.here == TRAINS and (one.tower or one.audio))
    head = HEAD.format(tiny=tiny, version=transformers.__version__, summary=summary(found))
    return head + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(one: Surveyed) -> list[str]:
    *names, here = (cell.replace("|", "\\|").replace("*", "\\*") for cell in one.cells)
    return [*(", ".join(f"`{part}`" for part in name.split(", ")) if name else "" for name in names), here]


if __name__ == "__main__":
    PAGE.write_text(page(list(survey())), encoding="utf-8")
