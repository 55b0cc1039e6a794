"""What lies on disk: the state of a run, saved whole or not at all, and model folders, examined."""

from octavo.checkpoint import rng
from octavo.checkpoint.background import Background
from octavo.checkpoint.dcp_safe import SafeReader
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.files import OTHER, copied, others, prune, read_state, steps, sweep
from octavo.checkpoint.hf import save_hf
from octavo.checkpoint.state import WITHOUT_STATES, Restored, latest, load, not_finite
from octavo.checkpoint.verify import verify
from octavo.checkpoint.verify.findings import Verified
from octavo.checkpoint.weights import load_weights
from octavo.checkpoint.writing import Moment, save, take, write

__all__ = [
    "Background",
    "CheckpointError",
    "OTHER",
    "WITHOUT_STATES",
    "Moment",
    "Restored",
    "SafeReader",
    "Verified",
    "copied",
    "latest",
    "load",
    "load_weights",
    "not_finite",
    "others",
    "prune",
    "read_state",
    "rng",
    "save",
    "save_hf",
    "steps",
    "sweep",
    "take",
    "verify",
    "write",
]
