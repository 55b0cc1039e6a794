"""One complete translation: from files of another framework to a file of Octavo, with the outcome of every key."""

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
from octavo.importers.source.keys import SourceKey
from octavo.importers.source.root_folder import Folder


@dataclass(frozen=True)
class Translation:
    """The result of a translation; nothing is written yet.

    content  the text of the file ``out``
    extra    files for a model folder next to it: path -> text
    problems  the problems for which Octavo refuses the file
    overridden     keys that another value overrides: (key, why)
    unread   lines of scripts that were not read: (place, text, why)
    """

    framework: str
    sources: str
    out: Path
    content: str
    extra: dict[Path, str]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    overridden: tuple[tuple[SourceKey, str], ...]
    unread: tuple[tuple[Place, str, str], ...]

    @property
    def report(self) -> Path:
        return self.out.with_name(f"{self.out.stem}.report.md")

    @property
    def lost_keys(self) -> tuple[str, ...]:
        """Keys that affect the numbers of the training and have no translation."""
        return tuple(row.source_key.key for row in self.rows if lost_keys.is_lost(row))

    @property
    def counts(self) -> dict[Kind, int]:
        numbers = Counter(row.kind for row in self.rows)
        return {kind: numbers[kind] for kind in HEADINGS}


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
    """Read one or two files (a configuration, a launch script or flags) and translate them. Nothing is written.

    framework  its name; None: it is recognized by its keys
    root       the folder that relative paths in the files start from
    world      number of processes of the original run; None: as the launch command says
    rows       number of rows of the training data, to convert fractions of a run to steps; None: counted if the data
               is on this machine
    variables  values of variables that a script leaves open
    fp8        a recipe for the whole model, instead of the FP8 settings of the files

    Raises TranslateError for files that cannot be read or recognized, ConfigError for invalid values.
    """
    files_given, folder = (
        [Path(path) for path in paths],
        Folder(Path(root).absolute(), [Path(path).absolute().parent for path in paths]),
    )
    # Which of two values wins depends on the framework, so a file is merged once to recognize it, and then again.
    module = detect.framework_by_name(framework) if framework else None
    parts = files.read_files(_sort_yaml_first(files_given), variables or {}, folder)
    if module is None:
        module = detect.detect_framework(files.merge_parts(parts, first_wins=False))
    source_config = files.merge_parts(parts, first_wins=module.FIRST_WINS)
    target = Path(out).absolute()
    draft = Draft(source_config, folder, target, num_processes=world, num_rows=rows)
    module.translate(draft)
    draft.finish()
    if fp8 is not None:
        _set_fp8_recipe(draft, fp8)
    sources = " and ".join(printable(path.name) for path in files_given)
    head = [
        f"Translated from {sources} ({module.NAME}) by octavo import.",
        f"{printable(target.stem)}.report.md lists the outcome of every key. Comments: source key, then reason.",
    ]
    content = output_file.render_yaml(draft.settings, head)
    model_folder = target.with_name(f"{target.stem}_model")
    return Translation(
        framework=module.NAME,
        sources=sources,
        out=target,
        content=content,
        extra={model_folder / name: text for name, text in draft.files.items()},
        rows=tuple(draft.rows[key] for key in draft.source_keys),
        notes=tuple(draft.notes),
        problems=output_file.find_problems(content, target),
        overridden=source_config.overridden,
        unread=source_config.unread,
    )


def _sort_yaml_first(paths: list[Path]) -> list[Path]:
    """Return the configuration before the flags, in whatever order the user named them."""
    return sorted(paths, key=lambda path: path.suffix not in (".yaml", ".yml", ".json"))


def _set_fp8_recipe(draft: Draft, recipe: str) -> None:
    """Replace the FP8 settings by the recipe that the user asked for."""
    for target in [target for target in draft.settings if target.startswith("fp8.")]:
        del draft.settings[target]
    draft.set("fp8.recipe", recipe, why="set with --fp8-recipe, instead of the settings in the files")
    draft.notes[:] = [note for note in draft.notes if not note.startswith("the source did not use FP8")]
    draft.add_note(f"fp8.recipe: {recipe} was set with --fp8-recipe; the report describes the FP8 keys of the files")
