"""Checks before the first step that each data set has a row that can be used.

Rows are read in the order of training (held-out rows in the order of the file) until one can be used, so the check
encodes one row of each data set unless rows are left out. If its images, sounds or videos are files, the first rows are
also read, not encoded, because that finds missing files. Every rank reads the same rows and comes to the same result.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from octavo.base.wording import count_noun
from octavo.data.batching.collate import Place
from octavo.data.encoding.sample import Sample
from octavo.data.errors import BadSample, DataError, LongSample, NoUsableRow
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.loader import ROWS_PER_CALL, BadRowPolicy, EncodedRows, Loader, RowEncoder
from octavo.data.loaders.pack_loader import PackLoader
from octavo.data.tasks.pairs import Pair
from octavo.data.tasks.sealed import samples_of

MAX_ROWS = 1000  # rows of a training set to read: if none of so many shuffled rows can be used, hardly any can
MEASURED_ROWS = 32  # rows to measure for the length that the error suggests
MAX_TOKENS = 1 << 22  # longest row to measure


def check_training_rows(loader: Loader | PackLoader) -> None:
    """Check that a training loader has a row of each data set to train on.

    Raises `NoUsableRow` if none of the first :data:`MAX_ROWS` rows of a data set in its first epoch can be used, with a
    line for each such data set, and the error of a bad row with on_bad_sample: error.
    """
    mixture = loader.mixture
    problems: list[NoUsableRow] = []
    for number, size in enumerate(mixture.sizes):
        order = mixture.orders[number]
        places = [(number, order.row(0, position)) for position in range(min(size, MAX_ROWS))]
        try:
            check_rows(loader.encoded, loader.policy, places, size)
        except NoUsableRow as problem:
            problems.append(problem)
        else:
            check_files(loader.encoded, loader.policy, places)
    _raise_all(problems)


def check_held_out_rows(held_out: EvalSet) -> None:
    """Check that held-out data have a row of each data set that is evaluated. Raises as `check_training_rows` does, but
    reads all rows of a data set if necessary, as each evaluation will."""
    remaining = held_out.rows
    problems: list[NoUsableRow] = []
    for number, source in enumerate(held_out.sources):
        if remaining > 0:  # `EvalSet.max_rows` may leave out later data sets
            places = ((number, row) for row in range(len(source)))
            first = [(number, row) for row in range(min(len(source), remaining, MAX_ROWS))]
            try:
                check_rows(held_out.encoded, held_out.policy, places, len(source))
            except NoUsableRow as problem:
                problems.append(problem)
            else:
                check_files(held_out.encoded, held_out.policy, first)
        remaining -= len(source)
    _raise_all(problems)


def _raise_all(problems: Sequence[NoUsableRow]) -> None:
    """Raise the problems of all data sets as one error, so that all can be mended at once."""
    if problems:
        raise sum(problems[1:], problems[0])


def check_rows(encoded: EncodedRows, policy: BadRowPolicy, places: Iterable[Place], size: int) -> None:
    """Check that one of these places of a data set with `size` rows has a row that can be used; if none has, list all
    of them in the report, and raise `NoUsableRow`."""
    remaining = iter(places)
    left_out: list[tuple[Place, BadSample]] = []
    # The first call has one row: usually it can be used, and encoding more would be a waste.
    chunk = list(islice(remaining, 1))
    while chunk:
        for place, row in zip(chunk, encoded[chunk], strict=True):
            if not isinstance(row, DataError):
                return
            left_out.append((place, policy.refuse(row)))
        chunk = list(islice(remaining, ROWS_PER_CALL))
    if left_out:
        for place, bad in left_out:
            policy.record(place, bad)
        raise _no_usable_row(encoded, left_out, size)


def check_files(encoded: EncodedRows, policy: BadRowPolicy, places: Sequence[Place]) -> None:
    """Read these rows without encoding them, if the first of them name files of images, sounds or videos: a name
    without a file is an error before training, not during it. Raises the error of a bad row, unless bad rows are
    skipped."""
    names_files = False
    for number, (source, row) in enumerate(places):
        if number == ROWS_PER_CALL and not names_files:
            return
        try:
            names_files |= _names_files(encoded.sources[source][row])
        except DataError as bad:
            policy.refuse(bad)


def _names_files(row: object) -> bool:
    """Whether a row as its source reads it names files. Joined documents are rows of tokens, without files."""
    kinds = (getattr(row, kind, ()) for kind in ("images", "sounds", "videos"))
    return any(isinstance(file, Path) for files in kinds if isinstance(files, Sequence) for file in files)


def _no_usable_row(encoded: EncodedRows, left_out: Sequence[tuple[Place, BadSample]], size: int) -> NoUsableRow:
    """Return the error of a data set of which these rows, all that were read, are left out."""
    (source, _), first = left_out[0]
    rows = count_noun(len(left_out), "row")
    which = f"its {rows}" if len(left_out) == size else f"the first {rows} that are read"
    name = encoded.sources[source].name
    too_long = list(_read(encoded, [place for place, bad in left_out if isinstance(bad, LongSample)]))
    if not too_long:
        return NoUsableRow(f"{name}: none of {which} can be used. Row {first.row} {first.reason}", quotes=True)
    counts = Counter(bad.action for _, bad in left_out)
    listed = ", ".join(f"{number} {action}" for action, number in counts.items())
    problem = "fits into" if len(counts) == 1 else f"can be used ({listed}), and the dropped ones do not fit into"
    return NoUsableRow(f"{name}: none of {which} {problem} {_advise(encoded.encoder, too_long)}", quotes=False)


def _read(encoded: EncodedRows, places: Iterable[Place]) -> Iterator[object]:
    """Yield these rows, without those that cannot be read, such as rows that were left out when they were sealed."""
    for source, row in places:
        with suppress(BadSample):
            yield encoded.sources[source][row]


def _advise(encoder: RowEncoder, rows: Sequence[object]) -> str:
    """Return the limit that these rows exceed, the length of the shortest, and what fixes it."""
    limit = f"train.seq_length: {encoder.seq_length + encoder.reserve}"
    if encoder.reserve:
        limit += f" ({encoder.reserve} of them for the answer)"
    measured = rows[:MEASURED_ROWS]  # encoding all rows again could take long
    lengths = _measure_lengths(encoder, measured)
    if not lengths:
        fixes = ["Raise train.seq_length"]
    else:
        limit += f"; the shortest{f' of {len(measured)}' if len(measured) < len(rows) else ''} has "
        limit += count_noun(min(lengths), "token")
        fixes = [f"Set train.seq_length to {min(lengths) + encoder.reserve} or more"]
        if min(lengths) < max(lengths):
            share = "all" if len(lengths) == len(measured) else f"{len(lengths)} of {len(measured)}"
            fixes[0] += f" ({max(lengths) + encoder.reserve} for {share})"
    if encoder.reserve:
        fixes.append("lower rl.max_new_tokens")
    if any(getattr(row, "images", ()) for row in rows):
        fixes.append("lower data.max_pixels")
    if "cut" not in encoder.on_long_options:
        limit += f", and data.on_long has no cut for {encoder.rows_kind}"
    elif not _has_tokens_after_cut(encoder, measured):
        limit += ", and data.on_long: cut leaves no token to learn"
    else:
        fixes.append("data.on_long to cut, which keeps the beginning of each row")
    return f"{limit}. {', or '.join([', '.join(fixes[:-1]), fixes[-1]] if len(fixes) > 1 else fixes)}"


def _has_tokens_after_cut(encoder: RowEncoder, rows: Sequence[object]) -> bool:
    """Return whether on_long: cut keeps a token to learn in one of these rows; a long prompt leaves none."""
    encoder = copy.copy(encoder)
    encoder.on_long = "cut"
    return any(isinstance(row, Sample | Pair) for row in encoder.encode_all(rows))


def _measure_lengths(encoder: RowEncoder, rows: Sequence[object]) -> list[int]:
    """Return the numbers of tokens of the rows that fit into the least limit, in steps of a factor of four, into which
    any fits; the shortest is among them. Nothing if each row has more than :data:`MAX_TOKENS`."""
    encoder = copy.copy(encoder)
    encoder.on_long = "drop"
    while encoder.seq_length < MAX_TOKENS:
        # A row far over the limit costs little, so the limit is raised until one fits: then all shorter rows fit, too.
        encoder.seq_length *= 4
        if fitting := [row for row in encoder.encode_all(rows) if isinstance(row, Sample | Pair)]:
            return [max(len(sample.input_ids) for sample in samples_of(row)) for row in fitting]
    return []
