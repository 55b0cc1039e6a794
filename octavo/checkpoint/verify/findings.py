"""The results of a verification: findings, verdicts of loaders, and errors against a reference (`VerifyResult`).

A finding is one sentence that names the file and the tensor and ends with the fix. ``fail`` means that something is
wrong; ``warn`` that the folder loads, with a consequence that the user should know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from octavo.base.safe_read import printable
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.verify.sentences import SENTENCES
from octavo.models.errors import ModelError

FAIL, WARN = "fail", "warn"
LOADERS = ("transformers", "vLLM", "SGLang")
#: what a loader may do. If several apply, the last one counts: a loader that refuses loads nothing wrong.
VERDICTS = OK, UNKNOWN, GARBAGE, REFUSES = ("ok", "unknown", "loads, wrong answers", "refuses")


class Consequence(NamedTuple):
    """A loader's verdict and its reason.

    run      True if the loader was run on such a folder, False if only its code was read
    warns    True if the reason is a warning about a folder that is loaded well
    decides  True if the prediction alone makes a folder fail: the loader's rules for this kind of model are known
    fix      what the user can do, as the end of a sentence; "" if the folder has to be written again
    """

    verdict: str
    reason: str
    run: bool = False
    warns: bool = False
    decides: bool = False
    fix: str = ""


@dataclass(frozen=True)
class Finding:
    """One problem of a folder.

    status  fail or warn
    kind    a key of `loaders.CONSEQUENCES`, e.g. "scale-missing"
    file    the file's name in the folder, "" if it concerns the folder
    tensor  the name on disk, "" if it concerns the file
    text    the sentence, with the fix
    """

    status: str
    kind: str
    file: str
    tensor: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """What a loader does with the folder, the reason, and its source: the loader was run, or its code was read.

    verdict  one of `VERDICTS`
    warns    True if the verdict is ok and the reason is a warning
    """

    loader: str
    verdict: str
    reason: str
    source: str
    warns: bool = False


@dataclass(frozen=True)
class TensorComparison:
    """The comparison of a tensor with the reference.

    error   |value - reference| / |reference| over the whole tensor; None if only the reference is all zero
    sqnr    signal to noise in dB, 20 log10(1 / error); infinite if both are equal
    bound   the error that a correct cast cannot exceed (`verify/compare_source.py`)
    status  ok, suspicious or bad
    codes   "identical" or "differ" if both sides are FP8 codes in the same blocks, else ""
    cause   the cause of a bad error, e.g. "its grid of scales is transposed"; "" if unknown
    """

    tensor: str
    file: str
    error: float | None
    sqnr: float
    bound: float
    status: str
    codes: str = ""
    cause: str = ""


class Located(Protocol):
    """A tensor in a file (`headers.FileTensor`)."""

    @property
    def file(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass
class Findings:
    """A list of findings, to which `fail` and `warn` add."""

    items: list[Finding] = field(default_factory=list)

    def fail(self, kind: str, at: Located | str = "", tensor: str = "", **values: object) -> None:
        """Add a failure.

        kind    a key of `SENTENCES`
        at      the tensor that is the subject of the sentence; or a file name, with `tensor` for a tensor in it
        values  the values in the sentence; `text` replaces the sentence
        """
        self._add(FAIL, kind, at, tensor, values)

    def warn(self, kind: str, at: Located | str = "", tensor: str = "", **values: object) -> None:
        """Add a warning. See `fail`."""
        self._add(WARN, kind, at, tensor, values)

    def _add(self, status: str, kind: str, at: Located | str, tensor: str, values: dict[str, object]) -> None:
        if isinstance(at, str):
            file, fields = at, {"file": at, "name": tensor, **values}
        else:
            file, tensor, fields = at.file, at.name, {"tensor": at, "shape": list(at.shape), **values}
        text = str(values["text"]) if "text" in values else SENTENCES[kind].format(**fields)
        if not isinstance(at, str):
            text = f"{at.name!r} in {at.file} {text}"
        self.items.append(Finding(status, kind.partition("/")[0], file, tensor, printable(text)))

    @contextmanager
    def collect_errors(self, file: str, kind: str = "config") -> Iterator[None]:
        """Turn an error of a reader in the block into a failure about the file."""
        try:
            yield
        except (ModelError, CheckpointError, OSError) as error:
            self.fail(kind, file, text=str(error))

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.items)

    def ordered(self) -> tuple[Finding, ...]:
        """Return the findings, failures first."""
        return tuple(sorted(self.items, key=lambda finding: finding.status != FAIL))


@dataclass(frozen=True)
class VerifyResult:
    """The outcome of `verify`.

    form      form of the weights, e.g. "plain BF16", "PEFT adapter, rank 8"
    tensors   number of tensors in the headers; size: their bytes; fp8: how many of them are FP8 codes
    scanned   True if values were read; False with quick
    findings  worst first
    verdicts  one per loader
    compared  one per tensor if a reference was given, worst first
    unread    names of files in the folder that were not read
    """

    directory: Path
    form: str
    tensors: int
    size: int
    fp8: int
    scanned: bool
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]
    compared: tuple[TensorComparison, ...] = ()
    against: Path | None = None
    unread: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if there are no failures; warnings are allowed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.status == FAIL)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.status == WARN)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; an infinite SQNR is null, with an error of 0."""
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
        """Return the first failure and how many more there are, for the error message of a command that stops."""
        if self.ok:
            return f"{self.directory} passes all checks."
        kinds = Counter(f.kind for f in self.failures)
        others = f" ({len(self.failures) - 1} more: {', '.join(kinds)})" if len(self.failures) > 1 else ""
        return f"{self.failures[0].text}{others} See `octavo verify {self.directory}`."
