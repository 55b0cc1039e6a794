"""What a verification says: findings, verdicts of loaders, errors against a reference, and all of it as one value.

A finding is one sentence that names the file and the tensor and ends with the fix. ``fail`` means that something is
wrong; ``warn`` that it loads, with a consequence somebody should know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.base.safe_read import printable
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.verify.sentences import SENTENCES
from octavo.models.errors import ModelError

FAIL, WARN = "fail", "warn"
LOADERS = ("transformers", "vLLM", "SGLang")
#: what a loader may do. A folder that gives cause for several gets the last of them: who refuses loads no garbage.
VERDICTS = ("ok", "warns", "loads garbage", "refuses")


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    status  fail or warn
    kind    what it is in a word of the list in `loaders.CONSEQUENCES`, e.g. "scale-missing"
    file    the file's name in the folder, "" where it is about the folder
    tensor  the name on disk, "" where it is about the file
    text    the sentence, with the fix
    """

    status: str
    kind: str
    file: str
    tensor: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """What a loader does with the folder, why, and how that is known: run, or read from the loader's code."""

    loader: str
    verdict: str
    reason: str
    source: str


@dataclass(frozen=True)
class Compared:
    """A tensor beside the reference's.

    error   |value - reference| / |reference|, over the whole tensor; None where the reference is all zero and it is not
    sqnr    signal to noise in dB, 20 log10(1 / error); infinite where both are equal
    bound   the error that a correct cast cannot exceed (`verify/compare_source.py`)
    status  ok, suspicious or bad
    codes   "identical" or "differ" where both sides are FP8 codes of one kind, else ""
    cause   what explains a bad error exactly, e.g. "the scale grid is transposed"; "" where nothing tried does
    """

    tensor: str
    file: str
    error: float | None
    sqnr: float
    bound: float
    status: str
    codes: str = ""
    cause: str = ""


@dataclass
class Findings:
    """Collects findings; `fail` and `warn` add one."""

    items: list[Finding] = field(default_factory=list)

    def fail(self, kind: str, at: Any = "", tensor: str = "", **values: Any) -> None:
        """`kind`: of `SENTENCES`, whose words take `values`; or `text` is the sentence. `at`: the tensor (a `Held`),
        which with its file becomes the sentence's subject; or the file's name."""
        self._add(FAIL, kind, at, tensor, values)

    def warn(self, kind: str, at: Any = "", tensor: str = "", **values: Any) -> None:
        self._add(WARN, kind, at, tensor, values)

    def _add(self, status: str, kind: str, at: Any, tensor: str, values: dict[str, Any]) -> None:
        held = None if isinstance(at, str) else at
        about = {"file": at, "name": tensor} if held is None else {"held": held, "shape": list(held.shape)}
        text = values["text"] if "text" in values else SENTENCES[kind].format(**{**about, **values})
        if held is not None:
            at, tensor, text = held.file, held.name, f"{held.name!r} in {held.file} {text}"
        self.items.append(Finding(status, kind.partition("/")[0], at, tensor, printable(text)))

    @contextmanager
    def failing(self, file: str, kind: str = "config") -> Iterator[None]:
        """What a reader refuses becomes a finding about the file."""
        try:
            yield
        except (ModelError, CheckpointError, OSError) as error:
            self.fail(kind, file, text=str(error))

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.items)

    def ordered(self) -> tuple[Finding, ...]:
        """Failures first."""
        return tuple(sorted(self.items, key=lambda finding: finding.status != FAIL))


@dataclass(frozen=True)
class Verified:
    """The outcome of `verify`.

    form      what the folder is, e.g. "plain bfloat16", "FP8 block 128x128 (fp8)", "PEFT adapter"
    tensors   how many the headers name; size: their bytes; fp8: how many of them are FP8 codes
    scanned   whether values were read (not with quick)
    findings  worst first
    verdicts  one a loader
    compared  one a tensor where a reference was given, worst first
    unread    names of what stands in the folder and was not read
    """

    directory: Path
    form: str
    tensors: int
    size: int
    fp8: int
    scanned: bool
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]
    compared: tuple[Compared, ...] = ()
    against: Path | None = None
    unread: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing is wrong; warnings allow it."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.status == FAIL)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.status == WARN)

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON takes it; an infinite SQNR is null beside an error of 0."""
        return {
            "directory": str(self.directory),
            "against": None if self.against is None else str(self.against),
            "ok": self.ok,
            "form": self.form,
            "tensors": self.tensors,
            "bytes": self.size,
            "fp8_tensors": self.fp8,
            "scanned": self.scanned,
            "findings": [vars(f) for f in self.findings],
            "verdicts": {v.loader: {k: x for k, x in vars(v).items() if k != "loader"} for v in self.verdicts},
            "compared": [vars(c) for c in self.compared],
            "unread": list(self.unread),
        }

    def sentence(self) -> str:
        """The first failure and how many more there are; for an error message of a command that will not go on."""
        if self.ok:
            return f"{self.directory} is sound."
        kinds = Counter(f.kind for f in self.failures)
        more = f" ({len(self.failures) - 1} more: {', '.join(kinds)})" if len(self.failures) > 1 else ""
        return f"{self.failures[0].text}{more} See `octavo verify {self.directory}`."
