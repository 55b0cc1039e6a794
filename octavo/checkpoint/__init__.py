"""Checkpoints on disk: run states that are saved completely or not at all, and checks of model folders."""

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.hf_folder import save_hf
from octavo.checkpoint.run_state import rng
from octavo.checkpoint.run_state.background import BackgroundSaver
from octavo.checkpoint.run_state.dcp_safe import SafeReader
from octavo.checkpoint.run_state.files import (
    MOVED_SUFFIX,
    foreign_entries,
    has_saves,
    prune,
    read_state,
    remove_leftovers,
    steps,
    why_misplaced,
)
from octavo.checkpoint.run_state.state import WITHOUT_STATES, RestoredState, describe_nonfinite, latest, load
from octavo.checkpoint.run_state.weights import load_weights
from octavo.checkpoint.run_state.writing import Snapshot, save, take_snapshot, write
from octavo.checkpoint.verify import verify
from octavo.checkpoint.verify.findings import VerifyResult

__all__ = [
    "BackgroundSaver", "CheckpointError", "MOVED_SUFFIX", "RestoredState", "SafeReader", "Snapshot", "VerifyResult",
    "WITHOUT_STATES", "describe_nonfinite", "foreign_entries", "has_saves", "latest", "load", "load_weights", "prune",
    "read_state", "remove_leftovers", "rng", "save", "save_hf", "steps", "take_snapshot", "verify",
    "why_misplaced", "write",
]  # fmt: skip
