"""Reads runs, checkpoints and exports of Octavo 0.4.0: one function per format that has changed since.

Files of 0.5.0 need no conversion: they have today's formats, as `tests/test_made_by_0_5_0.py` checks. All of it will be
removed in 1.0. This file imports nothing else from its package, so that every file there can use it. Some formats are
read where they are used, because those packages are below this one, or must not load torch:

    octavo.fp8.planning.file          `sisters` in plan files: layers that ran as one GEMM
    octavo.fp8.planning.file_form     plan files without `casts`, also of 0.5.0
    octavo.fp8.measuring.cases        fields of measurements for such layers, and `blockwise`, also of 0.5.0
    octavo.fp8.policy.policy          `fuse: auto`; octavo.config.sections.fp8 reads it as off
    octavo.fp8.optim.state_dict       moments in `coat` whose powers are not multiples of 1/16
    octavo.base.encryption            encrypted files of version 1, which are not bound to their names
    octavo.data.file_digests          the digest of the first 64 MiB, if there is none of the whole file
    octavo.report                     records without a time, a device or predicted memory (history, page, judge)

Configuration keys that are newer than a checkpoint have their defaults when its settings are compared
(`octavo.train.run_dir.run_dir`); that is not specific to one version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo import fp8
from octavo.models.folder.folder import INDEX, companions


def find_nonfinite(state: Mapping[str, Any], values: Callable[[], Iterable[tuple[str, Tensor]]]) -> str | None:
    """Return the first tensor of a checkpoint that contains NaN or infinity, or None.

    For 0.4.0, until 1.0. Its state.json has no "finite", because values were not checked, so `values` are read here.
    """
    if state.get("finite"):
        return None
    return next((name for name, tensor in values() if fp8.find_nonfinite([(name, tensor)])), None)


def why_not_finished(result: Mapping[str, Any], last_checkpoint: Callable[[], str | None]) -> str | None:
    """Return why a run must continue although its result.json records it as finished, or None if it has finished.

    For 0.4.0, until 1.0. It ended runs whose last step was skipped, or whose last checkpoint holds NaN;
    `last_checkpoint` returns the latter as a sentence.
    """
    if (result.get("final") or {}).get("skipped"):
        return "its last step was skipped (loss or gradient were not finite)"
    return last_checkpoint()


def complete_counters(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters of a checkpoint, with defaults for missing ones.

    For 0.4.0, until 1.0. It did not record the last step with trained tokens, so every step counts as one;
    it packed no rows, so the position among packs is 0.
    """
    return {"learnt": counters.get("step", 0), "window": 0, "pack": 0, "packs": 0, **counters}


def image_backend(counters: Mapping[str, Any]) -> str:
    """Return the library that resized the images of a checkpoint's run.

    For 0.4.0, until 1.0. It did not record the library, and supported only Pillow.
    """
    return str(counters.get("pixels", "pil"))


def fingerprints_differ(saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> bool:
    """Return whether two fingerprints of a file ({"size", "sha256", "whole"}, or None for a missing file) differ.

    For 0.4.0, until 1.0. It has no "whole", the digest of all bytes, so only keys that both have are compared.
    """
    if saved is None or current is None:
        return saved != current
    return any(saved[key] != current[key] for key in {*saved} & {*current})


def has_sibling_gemms(plan: Mapping[str, Any]) -> bool:
    """Return whether a run's plan.json runs layers with the same input as one GEMM, so that it must be written again.

    For 0.4.0, until 1.0. Today each layer runs its own GEMM, and the plan has no `sisters`.
    """
    return any(line["fuse"] == "on" for line in plan.get("sisters") or ())


def export_checksums(note: Mapping[str, Any]) -> Any:
    """Return the SHA-256 by file name in the note of an export, unchecked.

    For 0.4.0, until 1.0. Its notes have no checksums, and no digest of the note itself, so they cannot be verified.
    """
    return note.get("sha256", {})


def exported_names(note: Mapping[str, Any], folder: Path) -> set[str]:
    """Return the names of files that an export without checksums may have written into `folder`, except its note.

    For 0.4.0, until 1.0. It listed only weight files, so every other standard file of a model folder may be from it.
    """
    return {INDEX, "config.json", *note["files"], *(file.name for file in companions(folder))}
