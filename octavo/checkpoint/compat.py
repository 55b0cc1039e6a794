"""What runs, checkpoints and exports of Octavo 0.4.0 say otherwise than those of today: a function for each form.

All of this goes at 1.0. It imports nothing else of this package, so that every file of it can ask here.

Some forms are read where they are used, because those packages lie below this one, or must not load torch:

    octavo.fp8.planning.file          `sisters` in plan files: layers that ran as one GEMM
    octavo.fp8.measuring.cases        fields of measurements for such layers
    octavo.fp8.policy.policy          `fuse: auto`; octavo.config.sections.fp8 reads it as off
    octavo.fp8.optim.state_dict       moments in `coat` whose powers are no multiples of 1/16
    octavo.base.encryption            encrypted files of version 1, whose names are bound to nothing
    octavo.data.file_digests          the digest of the first 64 MiB, where there is none of all
    octavo.report                     records without a time, a device or predicted memory (history, page, judge)

Keys of a configuration that came later have their defaults when a checkpoint's settings are compared
(`octavo.train.run_dir.run_dir`); that is no matter of one version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo import fp8
from octavo.models.folder.folder import INDEX, companions


def not_finite(state: Mapping[str, Any], values: Callable[[], Iterable[tuple[str, Tensor]]]) -> str | None:
    """The first tensor of a checkpoint that holds NaN or infinity; None where none does.

    Of 0.4.0; goes at 1.0. Its state.json does not say "finite", since nothing looked: the values are read here.
    """
    if state.get("finite"):
        return None
    return next((name for name, tensor in values() if fp8.find_nonfinite([(name, tensor)])), None)


def why_not_finished(result: Mapping[str, Any], last: Callable[[], str | None]) -> str | None:
    """Why a run whose result.json says that it has finished must go on; None: it has finished.

    Of 0.4.0; goes at 1.0. It ended runs whose last step was skipped, or whose last checkpoint holds NaN, which `last`
    gives in a sentence.
    """
    if (result.get("final") or {}).get("skipped"):
        return "its last step was skipped (loss or gradient were not finite)"
    return last()


def progress(counters: Mapping[str, Any]) -> dict[str, Any]:
    """The counters of a checkpoint with those that it lacks.

    Of 0.4.0; goes at 1.0. It did not note the last step with a token to learn, so each counts as one that had some;
    it packed no rows, so there is no place among packs.
    """
    return {"learnt": counters.get("step", 0), "window": 0, "pack": 0, "packs": 0, **counters}


def pixels(counters: Mapping[str, Any]) -> str:
    """What resized the images of a checkpoint's run.

    Of 0.4.0; goes at 1.0. It did not note that, and knew Pillow alone.
    """
    return str(counters.get("pixels", "pil"))


def prints_differ(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two fingerprints of a file ({"size", "sha256", "whole"}; None: it is not there) are of other bytes.

    Of 0.4.0; goes at 1.0, when both have all keys. It has no "whole", the digest of all bytes: what both have decides.
    """
    if one is None or other is None:
        return one != other
    return any(one[key] != other[key] for key in {*one} & {*other})


def ran_siblings_as_one(plan: Mapping[str, Any]) -> bool:
    """Whether a run's plan.json lets layers of one input run as one GEMM, so that it must be written anew.

    Of 0.4.0; goes at 1.0. Each layer runs a GEMM of its own now, and the plan has no `sisters`.
    """
    return any(line["fuse"] == "on" for line in plan.get("sisters") or ())


def export_sums(note: Mapping[str, Any]) -> Any:
    """SHA-256 by file name in the note of an export, as it stands there: unchecked.

    Of 0.4.0; goes at 1.0. It noted none, and no digest of the note itself, which then is compared with nothing.
    """
    return note.get("sha256", {})


def names_in_export(note: Mapping[str, Any], folder: Path) -> set[str]:
    """The files that an export without sums wrote into `folder`, as far as names tell; its note is not among them.

    Of 0.4.0; goes at 1.0. It listed files of weights alone: what else a model folder holds may be its own.
    """
    return {INDEX, "config.json", *note["files"], *(file.name for file in companions(folder))}
