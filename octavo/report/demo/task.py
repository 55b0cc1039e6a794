"""What one demo trains, claims and asks. :mod:`octavo.report.demo.demo` runs any such task."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import Config, ConfigError, load_config, load_config_text
from octavo.report.demo.power import DemoPower
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trust_table import Check

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console

    from octavo.report.trial.report_page import Interview

CONFIGURATION = "demo.yaml"  # in the demo's folder

RunData = Mapping[str, Any]  # what a verdict has about a run


@dataclass(frozen=True)
class Answer:
    """One question, the answer of the FP8 model, and the truth. ``has_one_answer``: no other words would be right."""

    question: str
    answer: str
    truth: str
    has_one_answer: bool = True

    @property
    def right(self) -> bool | None:
        """Whether the answer is right, or None if comparing words does not decide that."""
        return self.answer == self.truth if self.has_one_answer else None


@dataclass(frozen=True)
class DemoAnswers:
    """Answers to questions, about an ``image`` if there is one, and the number of FP8 GEMMs that computed them."""

    title: str
    answers: tuple[Answer, ...]
    gemms: int
    image: Image | None = None
    note: str = ""

    def to_interview(self, label: str) -> Interview:
        """Return what the page of the trial shows; ``label``: of the run that answered."""
        from octavo.report.trial.report_page import Interview  # it imports torch, which --power does not need

        picture = ""
        if self.image is not None:
            out = io.BytesIO()
            self.image.save(out, "PNG")
            picture = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
        rows = [asdict(answer) | {"right": answer.right} for answer in self.answers]
        return Interview(self.title, label, rows, picture, self.note)


@dataclass(frozen=True)
class DemoTask:
    """A demo: a model and data to train in both precisions, the claim that decides, and a question for the FP8 model.

    command        the command that runs it
    configuration  file of the package, which becomes ``demo.yaml`` in the demo's folder
    directory      the default folder
    recipe         the FP8 recipe
    steps          the number of steps that the recorded seeds trained
    claim          the name of the claim, which is the only one that is judged
    power          returns what the recorded seeds say about this task, with the margin
    describe       returns the sentences about what is trained, printed first
    write_inputs   writes what the runs need into a folder for a number of steps, a console and a seed; returns the
                   configuration. Raises ``ReportError`` if something is missing or belongs to another demo
    has_recorded_inputs  returns whether the recorded seeds used the same data
    ask            asks the model of a run, given the run's folder and the demo's
    results        what the last screen says for a status of the claim, with {dtype} of high precision
    describe_figures  returns the claim's figures on the last screen, of the FP8 and the high-precision run
    describe_answers  returns the line about the answers; takes the demo's folder
    next_commands  returns the commands to try next; takes the demo's folder and the FP8 run's name
    """

    command: str
    configuration: str
    directory: str
    recipe: str
    steps: int
    claim: str
    power: Callable[[], DemoPower]
    describe: Callable[[Config], list[str]]
    write_inputs: Callable[[Path, int, Console | None, int], Config]
    has_recorded_inputs: Callable[[Config], bool]
    ask: Callable[[Path, Path], DemoAnswers]
    results: Mapping[str, str]
    describe_figures: Callable[[Check, RunData, RunData, str], str]
    describe_answers: Callable[[DemoAnswers, Path], str]
    next_commands: Callable[[Path, str], list[str]]

    def read_configuration(self) -> str:
        """Return the text of the configuration in the package."""
        return resources.files(__package__).joinpath(self.configuration).read_text(encoding="utf-8")

    def check_folder(self, directory: Path) -> None:
        """Raise ``ReportError`` if the folder's ``demo.yaml`` is of another demo, or of none. Its settings may have
        been changed, but it trains on the demo's data. Call before anything is written there."""
        file = directory / CONFIGURATION
        if not file.is_file():
            return
        fix = "name another folder with --dir"
        try:
            cfg = load_config(file)
        except ConfigError as error:
            raise ReportError(f"{file} is no configuration of {self.command}; {fix}. {error}") from error
        expected = _trained_on(load_config_text(self.read_configuration()))
        if not {*expected} <= {*_trained_on(cfg)}:
            raise ReportError(
                f"{file} trains on {', '.join(_trained_on(cfg))}, and {self.command} on {', '.join(expected)}: it is "
                f"of another demo, or yours; {fix}"
            )

    def load_configuration(self, directory: Path, steps: int, seed: int) -> Config:
        """Return the configuration of the folder's ``demo.yaml`` for ``steps`` steps. A warm-up that would take all of
        them is shortened to one step less."""
        file = directory / CONFIGURATION
        warmup = min(load_config(file).train.warmup, steps - 1)
        return load_config(file, [f"train.steps={steps}", f"train.warmup={warmup}", f"run.seed={seed}"])


def _trained_on(cfg: Config) -> list[str]:
    """Return the files of ``data.train``, each with its folder, because the folders above may be moved."""
    return [str(Path(*Path(entry.path).parts[-2:])) for entry in cfg.data.train]
