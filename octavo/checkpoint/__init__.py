"""The state of a run on disk: saved whole or not at all, read without pickle's powers."""

from octavo.checkpoint import rng
from octavo.checkpoint.dcp_safe import SafeReader
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.files import prune, steps, sweep
from octavo.checkpoint.state import Restored, latest, load, save

__all__ = ["CheckpointError", "Restored", "SafeReader", "latest", "load", "prune", "rng", "save", "steps", "sweep"]
