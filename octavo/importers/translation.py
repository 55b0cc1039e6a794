"""One translation, whole: from files of another framework to a file of ours, with what became of every key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.base.safe_read import printable
from octavo.config import Problem
from octavo.config.yaml.problems import Place
from octavo.importers import detect, lost_keys, output_file
from octavo.importers.common.draft import Draft
from octavo.importers.common.key_outcomes import HEADINGS, Kind, Row
from octavo.importers.source import files
from octavo.importers.source.keys import Given
from octavo.importers.source.root_folder import Folder


@dataclass(frozen=True)
class Translation:
    """``content`` is the text of the file ``out``; ``extra`` are files of a model's folder beside it; ``refused`` is
    what Octavo says against the file as it stands."""

    framework: str
    sources: str
    out: Path
    content: str
    extra: dict[Path, str]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    refused: tuple[Problem, ...]
    lost: tuple[tuple[Given, str], ...]
    unread: tuple[tuple[Place, str, str], ...]

    @property
    def report(self) -> Path:
        return self.out.with_name(f"{self.out.stem}.report.md")

    @property
    def lost_keys(self) -> tuple[str, ...]:
        """Keys that decide numbers and have no translation."""
        return tuple(row.given.key for row in self.rows if lost_keys.is_lost(row))

    @property
    def counts(self) -> dict[Kind, int]:
        found = Counter(row.kind for row in self.rows)
        return {kind: found[kind] for kind in HEADINGS}


def translate(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    framework: str | None = None,
    root: str | Path = ".",
    world: int | None = None,
    rows: int | None = None,
    variables: Mapping[str, str] | None = None,
    fp8: str | None = None,
) -> Translation:
    """Reads one or two files (a configuration, a launch script or flags) and translates them; nothing is written.

    framework  its name; None: it is recognised by its keys
    root       the folder that their relative paths are seen from
    world      processes that trained there; None: as the launch says
    rows       rows of the training data, which make shares of a run into steps; None: counted where they lie here
    variables  values of variables that a script leaves open
    fp8        a recipe for the whole model, in place of what the files say of FP8

    Raises TranslateError for files that cannot be read or recognised, ConfigError for values that are nonsense.
    """
    given, folder = (
        [Path(path) for path in paths],
        Folder(Path(root).absolute(), [Path(path).absolute().parent for path in paths]),
    )
    module = detect.named(framework) if framework else None
    parts = files.read(_yaml_first(given), variables or {}, folder)
    if module is None:
        module = detect.framework_of(files.merged(parts, first_wins=False))
    foreign = files.merged(parts, first_wins=module.FIRST_WINS)
    target = Path(out).absolute()
    draft = Draft(foreign, folder, target, world=world, sizes=rows)
    module.translate(draft)
    draft.finish()
    if fp8 is not None:
        _with_fp8(draft, fp8)
    sources = " and ".join(printable(path.name) for path in given)
    head = [f"Translated from {sources} ({module.NAME}) by octavo import; {printable(target.stem)}.report.md says what",
            "became of every key. Comments: theirs, then why."]  # fmt: skip
    content = output_file.text(draft.settings, head)
    folder = target.with_name(f"{target.stem}_model")
    return Translation(
        module.NAME, sources, target, content, {folder / name: text for name, text in draft.files.items()},
        tuple(draft.rows[key] for key in draft.given), tuple(draft.notes), output_file.refused(content, target),
        foreign.lost, foreign.unread,
    )  # fmt: skip


def _yaml_first(paths: list[Path]) -> list[Path]:
    """A configuration before the flags it is started with, in whichever order they were named."""
    return sorted(paths, key=lambda path: path.suffix not in (".yaml", ".yml", ".json"))


def _with_fp8(draft: Draft, recipe: str) -> None:
    """FP8 as the user asks for it here, in place of theirs."""
    for target in [target for target in draft.settings if target.startswith("fp8.")]:
        del draft.settings[target]
    draft.put("fp8.recipe", recipe, why="asked for with --fp8-recipe, in place of what the files say")
    draft.notes[:] = [note for note in draft.notes if not note.startswith("there was no FP8")]
    draft.note(f"fp8.recipe: {recipe} was asked for (--fp8-recipe); what the report says of FP8 keys is of theirs")
