"""All rewards of a run: computes them for a batch of completions, adds them up by weight, and reports errors by row."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.base import encryption
from octavo.base.safe_read import printable
from octavo.rl.rewards.entry import Entry, RewardError, read_entries
from octavo.rl.rewards.python_functions import PythonFunction
from octavo.rl.rewards.worker_client import Worker, WorkerError

if TYPE_CHECKING:
    import torch

# (completions, columns of the rows) -> a value for each completion
Ask = Callable[[list[str], dict[str, list[object]]], Sequence[Any]]
LARGEST = 1e12  # the largest reward: its weighted square is finite in fp32 too
LISTED = 3  # reasons that an error lists; the others are counted
ON_BAD = ("error", "zero")


@dataclass(frozen=True)
class RewardTable:
    """The rewards of N completions. `totals` [N] float64: the weighted sum; `each`: name -> [N] float64 before weights,
    NaN if a reward returned no number, which counts as 0 in the sum; `bad`: (row, name, reason) of each such value."""

    totals: np.ndarray
    each: dict[str, np.ndarray] = field(default_factory=dict)
    bad: list[tuple[int, str, str]] = field(default_factory=list)


class Rewards:
    """The rewards of a configuration (`entry.py` documents the entries).

    entries    names, or mappings with `reward`, `weight`, `name` and arguments
    directory  folder of the configuration; paths are relative to it
    on_bad     action for a row on which a reward raises, hangs, or returns no finite number: "error" ends the run,
               "zero" counts it as 0
    timeout    seconds that a function may take for a batch, and again for its rows one by one if it raised
    device     device of reward models

    Functions of files run in separate processes, one per file, which start here, persist over steps and end with the
    trainer (`worker.py`); functions of the program run in this one (`python_functions.py`), without the time limit.
    Raises RewardError for an entry that cannot be used, including a file without the named function.
    """

    def __init__(
        self,
        entries: Sequence[str | Mapping[str, object]],
        directory: str | Path,
        on_bad: str = "error",
        timeout: float = 60.0,
        device: str | torch.device = "cpu",
    ) -> None:
        if on_bad not in ON_BAD:
            raise RewardError(f"on_bad_reward is {on_bad!r}; it must be error or zero")
        if not (timeout > 0 and math.isfinite(timeout)):
            raise RewardError(f"the time limit of rewards is {timeout!r}; expected a number of seconds above 0")
        self.on_bad, self.timeout = on_bad, timeout
        self.entries = read_entries(entries, Path(directory))
        # Workers start here, not at the first score: a file that does not load is an error before the first rollout.
        self._columns: tuple[str, ...] = ()
        self._workers: dict[Path, Worker] = {}
        self._python: dict[str, PythonFunction] = {}
        self._ask: dict[str, Ask] = {}
        self._known: set[tuple[str, str]] = set()
        self._news: list[str] = []
        self._counts: Counter[str] = Counter()
        try:
            for entry in self.entries:
                self._ask[entry.name] = self._make_ask(entry, device)
            for worker in self._workers.values():
                self._start(worker)
            self._digest = [
                entry.digest(self._workers[entry.path].imported if entry.kind == "function" else {})
                for entry in self.entries
            ]
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    def expect(self, columns: Sequence[str]) -> None:
        """Set the columns of the rows of all datasets: a function receives each of them at each call, with None for
        rows without it. Raises RewardError if a function takes a column that no row has."""
        for entry in self.entries:
            needs = self._needs(entry)
            if missing := [name for name in needs if name not in columns and name not in entry.arguments]:
                raise RewardError(
                    f"reward {entry.name} ({entry.reward}) takes {', '.join(missing)}, but the columns of the rows are "
                    f"{', '.join(columns)}. Add it to the rows, name it under `arguments`, or give it a default"
                )
        self._columns = tuple(columns)

    def _needs(self, entry: Entry) -> Sequence[str]:
        """Return the columns that a user's function cannot be called without."""
        if entry.kind == "python":
            return self._python[entry.reward].needs
        return self._workers[entry.path].needs[entry.function] if entry.kind == "function" else ()

    def score(
        self,
        completions: Sequence[str],
        columns: dict[str, list[object]],
        where: Sequence[str] | None = None,
        pictures: Sequence[Sequence[object]] | None = None,
    ) -> RewardTable:
        """Compute the rewards of completions.

        Columns are lists of the same length with JSON values: `answer`, `prompt`, `messages`, `images`, `videos` and
        all other columns of the rows (`octavo.rl.rollout.rollout.reward_columns`). `where`: the file and row of each
        completion, for errors. `pictures`: the image files of each row for reward models, or None for the files in
        `images`.

        Raises RewardError if a reward does not return N finite numbers and `on_bad` is "error".
        """
        texts, count = list(completions), len(completions)
        for name, column in columns.items():
            if len(column) != count:
                raise ValueError(f"column {name!r} has {len(column)} values for {count} completions")
        absent: dict[str, list[object]] = {name: [None] * count for name in self._columns}
        columns = absent | columns
        shown: dict[str, list[object]] = columns if pictures is None else {**columns, "images": [*pictures]}
        each: dict[str, np.ndarray] = {}
        bad: list[tuple[int, str, str]] = []
        for entry in self.entries if count else ():
            try:
                values = self._ask[entry.name](texts, shown if entry.kind == "model" else columns)
            except WorkerError as fault:
                values = [str(fault)] * count
            # A reason (text) in place of a number becomes NaN, which the sum counts as 0.
            faulty = [(row, why) for row, value in enumerate(values) if (why := _why_unusable(value))]
            if faulty:
                self._report(entry, faulty, texts, where)
            bad += [(row, entry.name, reason) for row, reason in faulty]
            each[entry.name] = np.array([value if not isinstance(value, str) else 0.0 for value in values], np.float64)
            each[entry.name][[row for row, _ in faulty]] = np.nan
        totals = np.zeros(count)
        for entry in self.entries if count else ():
            totals += entry.weight * np.nan_to_num(each[entry.name])
        return RewardTable(totals, each or {name: np.zeros(0) for name in self.names}, bad)

    def take_reports(self) -> tuple[list[str], Counter[str]]:
        """Return and clear the failures since the last call, if `on_bad` is "zero": a message for each new kind of
        failure, and how many times each reward returned no number."""
        news, counts = self._news, self._counts
        self._news, self._counts = [], Counter()
        return news, counts

    def digest(self) -> list[dict[str, object]]:
        """Return the rewards as JSON: name, text, weight, arguments, and the SHA-256 of the folder, or of the file and
        its imports from its folder."""
        return self._digest

    def close(self) -> None:
        """End the worker processes."""
        for worker in self._workers.values():
            worker.close()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _make_ask(self, entry: Entry, device: str | torch.device) -> Ask:
        if entry.kind == "model":
            return self._model(entry, device)
        if entry.kind != "python":
            return self._function(entry)
        function = self._python.setdefault(entry.reward, PythonFunction(entry.reward))
        return lambda texts, columns: function.call(texts, columns, entry.arguments)

    def _function(self, entry: Entry) -> Callable[[list[str], dict[str, list[object]]], list[Any]]:
        if entry.kind == "function" and os.environ.get(encryption.VALUE):
            raise RewardError(
                f"reward {entry.name} ({printable(entry.reward)}) is a user's code, and {encryption.VALUE} is set: it "
                "could read the key from this process's environment (/proc). Unset it, and give the key with "
                "--key-file FILE"
            )
        functions = [other.function for other in self.entries if other.path == entry.path]
        worker = self._workers.setdefault(entry.path, Worker(entry.path, entry.source, functions))

        def ask(texts: list[str], columns: dict[str, list[object]]) -> list[Any]:
            if entry.kind == "builtin":  # other parameters are arguments, even if a column has that name
                columns = {name: column for name, column in columns.items() if name == "answer"}
            return worker.call(entry.function, texts, columns, entry.arguments, self.timeout)

        return ask

    def _model(self, entry: Entry, device: str | torch.device) -> Ask:
        from octavo.rl.rewards.model import RewardModel

        return RewardModel(entry.path, device=device, **entry.arguments)

    def _start(self, worker: Worker) -> None:
        try:
            worker.start()
        except WorkerError as fault:
            raise RewardError(
                f"the rewards of {printable(worker.path)} cannot be used: the file {printable(fault)}"
            ) from fault

    def _report(
        self, entry: Entry, faulty: list[tuple[int, str]], completions: list[str], where: Sequence[str] | None
    ) -> None:
        """Raise RewardError, or keep a message for :meth:`take_reports`. The kind of a reason is its text before the
        first digit or quote."""
        sentence = self._sentence(entry, faulty, completions, where)
        if self.on_bad == "error":
            bad = [(row, entry.name, reason) for row, reason in faulty]
            raise RewardError(f"{sentence}. Fix the function or the rows, or set rl.on_bad_reward: zero", bad)
        kinds = {(entry.name, re.split(r"[\d'\"]", reason)[0]) for _, reason in faulty}
        if kinds - self._known:
            self._news.append(f"{sentence}. They count as 0; further ones of this kind are only counted")
        self._known |= kinds
        self._counts[entry.name] += len(faulty)

    def _sentence(
        self, entry: Entry, faulty: list[tuple[int, str]], completions: list[str], where: Sequence[str] | None
    ) -> str:
        rows: dict[str, list[int]] = {}
        for row, reason in faulty:
            rows.setdefault(reason, []).append(row)
        lines = []
        for reason, bad_rows in list(rows.items())[:LISTED]:
            first = bad_rows[0]
            place = f"{where[first]}: " if where is not None else ""
            plural = "s" if len(bad_rows) > 1 else ""
            lines.append(
                f"Row{plural} {_format_rows(bad_rows)} ({place}{completions[first][:60]!r}{', ...' * bool(plural)}): "
                f"{reason}"
            )
        unlisted = f"; {len(rows) - LISTED} more reasons" if len(rows) > LISTED else ""
        return printable(
            f"reward {entry.name} ({entry.reward}) returned no number for {len(faulty)} of {len(completions)} "
            f"completions. {'. '.join(lines)}{unlisted}"
        )


def changed(before: Sequence[Mapping[str, object]], now: Sequence[Mapping[str, object]]) -> str | None:
    """Describe a reward that differs from an earlier digest; None if all are equal."""
    old, new = ({entry["name"]: entry for entry in digest} for digest in (before, now))
    if removed := [name for name in old if name not in new]:
        return f"the reward {removed[0]!r} was removed"
    if added := [name for name in new if name not in old]:
        return f"the reward {added[0]!r} was added"
    for name, entry in old.items():
        for key in sorted({*entry, *new[name]}):
            if entry.get(key) != new[name].get(key):
                changes = {
                    "sha256": "file, a file that it imports, or its folder has changed",
                    "reward": "entry has changed",
                }
                difference = changes.get(key, f"{key} is {new[name].get(key)!r} and was {entry.get(key)!r}")
                return f"the reward {name!r} has changed: its {difference}"
    return None


def _why_unusable(value: Any) -> str:
    """Return why a value is not a usable number, or an empty text if it is."""
    if isinstance(value, str) or not math.isfinite(value):
        return value if isinstance(value, str) else f"returned {value}"
    return f"returned {value:g}, and the limit of rewards is {LARGEST:g}" if abs(value) > LARGEST else ""


def _format_rows(rows: Sequence[int]) -> str:
    """Format rows 0, 1, 2, 5 as "0 to 2, 5", with at most five pieces."""
    pieces: list[list[int]] = []
    for row in rows:
        if pieces and row == pieces[-1][1] + 1:
            pieces[-1][1] = row
        else:
            pieces.append([row, row])
    named = [str(a) if a == b else f"{a} to {b}" for a, b in pieces[:5]]
    return ", ".join(named) + (f" and {len(pieces) - 5} more places" if len(pieces) > 5 else "")
