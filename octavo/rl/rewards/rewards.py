"""All rewards of a run: asked for a batch of completions, weighted and added up, with every fault named by row."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from octavo.base import encryption
from octavo.base.safe_read import printable
from octavo.rl.rewards.entry import Entry, RewardError, read_entries
from octavo.rl.rewards.worker_client import Worker, WorkerError

LARGEST = 1e12  # of a reward: its weighted square is a number in fp32 too
TOLD = 3  # reasons that an error lists; the others are counted
ON_BAD = ("error", "zero")


@dataclass(frozen=True)
class RewardTable:
    """What N completions are worth. `totals` [N] float64, the weighted sum; `each`: name -> [N] float64 before weights,
    NaN where a reward gave no number, which counts 0 in the sum; `bad`: (row, name, reason) of each such place."""

    totals: np.ndarray
    each: dict[str, np.ndarray] = field(default_factory=dict)
    bad: list[tuple[int, str, str]] = field(default_factory=list)


class Rewards:
    """The rewards that a configuration names (`entry.py` says how), ready to be asked.

    entries    names, or mappings with `reward`, `weight`, `name` and arguments
    directory  the folder of the configuration, which paths are relative to
    on_bad     what becomes of a row that a reward raises for, hangs over, or gives NaN, infinity or no number:
               "error" ends the run, "zero" counts 0 there and goes on
    timeout    seconds that a function may take for a batch, and again for its rows alone where it raised
    device     where reward models compute

    Functions run in processes of their own, one a file, which start here, live on over steps and end with the trainer
    (`worker.py`). Raises RewardError for an entry that cannot be used, also for a file whose function is not there.
    """

    def __init__(
        self,
        entries: Sequence[Any],
        directory: str | Path,
        on_bad: str = "error",
        timeout: float = 60.0,
        device: Any = "cpu",
    ) -> None:
        if on_bad not in ON_BAD:
            raise RewardError(f"on_bad_reward is {on_bad!r}; it must be error or zero")
        if not (timeout > 0 and math.isfinite(timeout)):
            raise RewardError(f"the time limit of rewards is {timeout!r}; expected seconds over 0")
        self.on_bad, self.timeout = on_bad, timeout
        self.entries = read_entries(entries, Path(directory))
        self._columns: tuple[str, ...] = ()
        self._workers: dict[Path, Worker] = {}
        self._ask: dict[str, Callable[[list[str], dict[str, list[Any]]], Sequence[Any]]] = {}
        self._known: set[tuple[str, str]] = set()
        self._news: list[str] = []
        self._counts: Counter[str] = Counter()
        try:
            for entry in self.entries:
                self._ask[entry.name] = self._model(entry, device) if entry.kind == "model" else self._function(entry)
            for worker in self._workers.values():
                self._start(worker)
            self._digest = [
                entry.digest(self._workers[entry.path].beside if entry.kind == "function" else {})
                for entry in self.entries
            ]
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    def expect(self, columns: Sequence[str]) -> None:
        """Columns that the rows have, all data sets together: a function is given each of them at each call, with None
        for rows without. Raises RewardError where a function asks for one that there is not."""
        for entry in self.entries:
            needs = self._workers[entry.path].needs[entry.function] if entry.kind == "function" else ()
            if lacks := [name for name in needs if name not in columns and name not in entry.arguments]:
                raise RewardError(
                    f"reward {entry.name} ({entry.reward}) takes {', '.join(lacks)}, and the columns of the rows are "
                    f"{', '.join(columns)}. Add it to the rows, name it under `arguments`, or give it a default"
                )
        self._columns = tuple(columns)

    def score(
        self,
        completions: Sequence[str],
        columns: dict[str, list[Any]],
        where: Sequence[str] | None = None,
        pictures: Sequence[Sequence[Any]] | None = None,
    ) -> RewardTable:
        """What each completion is worth.

        Columns are lists of the same length, of what JSON holds: `answer`, `prompt`, `messages`, `images`, `videos`
        and all others of the rows (`octavo.rl.rollout.rollout.reward_columns`). `where` names rows in errors (file and
        row).
        `pictures`: the image files of each row, which reward models are shown; None: those that `images` names. Raises
        RewardError where a reward gives anything but N finite numbers and `on_bad` is "error".
        """
        texts, count = list(completions), len(completions)
        for name, column in columns.items():
            if len(column) != count:
                raise ValueError(f"column {name!r} has {len(column)} values for {count} completions")
        columns = {name: [None] * count for name in self._columns} | columns
        shown = columns if pictures is None else {**columns, "images": [*pictures]}
        each: dict[str, np.ndarray] = {}
        bad: list[tuple[int, str, str]] = []
        for entry in self.entries if count else ():
            try:
                values = self._ask[entry.name](texts, shown if entry.kind == "model" else columns)
            except WorkerError as fault:
                values = [str(fault)] * count
            told = [(row, why) for row, value in enumerate(values) if (why := _no_number(value))]
            if told:
                self._hear(entry, told, texts, where)
            bad += [(row, entry.name, reason) for row, reason in told]
            each[entry.name] = np.array([value if not isinstance(value, str) else 0.0 for value in values], np.float64)
            each[entry.name][[row for row, _ in told]] = np.nan
        totals = np.zeros(count)
        for entry in self.entries if count else ():
            totals += entry.weight * np.nan_to_num(each[entry.name])
        return RewardTable(totals, each or {name: np.zeros(0) for name in self.names}, bad)

    def taken(self) -> tuple[list[str], Counter[str]]:
        """Since the last call, where `on_bad` is "zero": a sentence of each fault of a kind that there was not before,
        and how many times each reward gave no number."""
        found = self._news, self._counts
        self._news, self._counts = [], Counter()
        return found

    def digest(self) -> list[dict[str, Any]]:
        """What the rewards are, as JSON: name, text, weight, arguments and the SHA-256 of each one's folder, or of its
        file and what that imported of its own folder."""
        return self._digest

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            worker.close()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _function(self, entry: Entry) -> Callable[[list[str], dict[str, list[Any]]], list[Any]]:
        if entry.kind == "function" and os.environ.get(encryption.VALUE):
            raise RewardError(
                f"reward {entry.name} ({printable(entry.reward)}) is a user's code, and {encryption.VALUE} is set: it "
                "could read the key from this process's environment (/proc). Unset it, and give the key with "
                "--key-file FILE"
            )
        of_file = [one.function for one in self.entries if one.path == entry.path]
        worker = self._workers.setdefault(entry.path, Worker(entry.path, entry.source, of_file))

        def ask(texts: list[str], columns: dict[str, list[Any]]) -> list[Any]:
            if entry.kind == "builtin":  # whose other parameters are arguments, whatever a row calls its columns
                columns = {name: column for name, column in columns.items() if name == "answer"}
            return worker.call(entry.function, texts, columns, entry.arguments, self.timeout)

        return ask

    def _model(self, entry: Entry, device: Any) -> Callable[[list[str], dict[str, list[Any]]], Sequence[Any]]:
        from octavo.rl.rewards.model import RewardModel

        return RewardModel(entry.path, device=device, **entry.arguments)

    def _start(self, worker: Worker) -> None:
        try:
            worker.start()
        except WorkerError as fault:
            raise RewardError(
                f"the rewards of {printable(worker.path)} cannot be used: the file {printable(fault)}"
            ) from fault

    def _hear(
        self, entry: Entry, told: list[tuple[int, str]], completions: list[str], where: Sequence[str] | None
    ) -> None:
        """End the run, or keep what is to be said; kinds of reasons differ before their first number or quote."""
        said = self._said(entry, told, completions, where)
        if self.on_bad == "error":
            bad = [(row, entry.name, reason) for row, reason in told]
            raise RewardError(f"{said}. Mend the function or the rows, or set on_bad_reward: zero", bad)
        kinds = {(entry.name, re.split(r"[\d'\"]", reason)[0]) for _, reason in told}
        if kinds - self._known:
            self._news.append(f"{said}. They count 0; others like them are counted and not told")
        self._known |= kinds
        self._counts[entry.name] += len(told)

    def _said(
        self, entry: Entry, told: list[tuple[int, str]], completions: list[str], where: Sequence[str] | None
    ) -> str:
        rows: dict[str, list[int]] = {}
        for row, reason in told:
            rows.setdefault(reason, []).append(row)
        lines = []
        for reason, those in list(rows.items())[:TOLD]:
            first = those[0]
            place = f"{where[first]}: " if where is not None else ""
            many = "s" if len(those) > 1 else ""
            lines.append(
                f"Row{many} {_listed(those)} ({place}{completions[first][:60]!r}{', ...' * bool(many)}): {reason}"
            )
        more = f"; {len(rows) - TOLD} more reasons" if len(rows) > TOLD else ""
        return printable(
            f"reward {entry.name} ({entry.reward}) gave no number for {len(told)} of {len(completions)} completions. "
            f"{'. '.join(lines)}{more}"
        )


def changed(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str | None:
    """How rewards differ from those of an earlier digest, in a sentence that names one of them; None if they do not."""
    then, today = ({one["name"]: one for one in digest} for digest in (before, now))
    if gone := [name for name in then if name not in today]:
        return f"the reward {gone[0]!r} is not there any more"
    if new := [name for name in today if name not in then]:
        return f"the reward {new[0]!r} was not there"
    for name, one in then.items():
        for key in sorted({*one, *today[name]}):
            if one.get(key) != today[name].get(key):
                what = {
                    "sha256": "file, one that it imports, or its folder has another content",
                    "reward": "entry is another",
                }
                found = what.get(key, f"{key} is {today[name].get(key)!r} and was {one.get(key)!r}")
                return f"the reward {name!r} is another: its {found}"
    return None


def _no_number(value: Any) -> str:
    """What is wrong with a value, or nothing."""
    if isinstance(value, str) or not math.isfinite(value):
        return value if isinstance(value, str) else f"returned {value}"
    return f"returned {value:g}, and rewards go to {LARGEST:g}" if abs(value) > LARGEST else ""


def _listed(rows: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0 to 2, 5"; at most five pieces."""
    pieces: list[list[int]] = []
    for row in rows:
        if pieces and row == pieces[-1][1] + 1:
            pieces[-1][1] = row
        else:
            pieces.append([row, row])
    named = [str(a) if a == b else f"{a} to {b}" for a, b in pieces[:5]]
    return ", ".join(named) + (f" and {len(pieces) - 5} more places" if len(pieces) > 5 else "")
