"""What a run's data files held, so that a resume notices when they hold something else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config import Config
from octavo.train.errors import TrainError

_READ = 64 << 20  # bytes that are hashed of a file, from its start


def fingerprints(cfg: Config) -> dict[str, dict[str, Any]]:
    """Path -> {"size": bytes, "sha256": of the first 64 MiB} of the files of data.train and data.eval.

    A file that is not there is left out: octavo.data refuses it with better words. Images are not looked at.
    """
    paths = dict.fromkeys(source.path for source in [*cfg.data.train, *cfg.data.eval])
    return {path: _fingerprint(Path(path)) for path in paths if Path(path).is_file()}


def same(saved: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Refuse to continue `where` on changed data. Raises TrainError naming the files; one not in both is no matter."""
    changed = [path for path, value in saved.items() if path in now and now[path] != value]
    if changed:
        sizes = "; ".join(f"{path} had {saved[path]['size']} bytes, has {now[path]['size']} now" for path in changed)
        raise TrainError(
            f"{where} was made with other data: {sizes}, and other contents. A resumed run sees the same rows in the "
            "same order, which changed files cannot give; put the former files back, or start a new run in another "
            "run.dir"
        )


def _fingerprint(path: Path) -> dict[str, Any]:
    digest, left = hashlib.sha256(), _READ
    with path.open("rb") as file:
        while left and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}
