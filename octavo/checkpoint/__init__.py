"""What lies on disk: the state of a run, saved whole or not at all, and model folders, examined."""

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.hf_folder import save_hf
from octavo.checkpoint.run_state import rng
from octavo.checkpoint.run_state.background import Background
from octavo.checkpoint.run_state.dcp_safe import SafeReader
from octavo.checkpoint.run_state.files import OTHER, copied, others, prune, read_state, steps, sweep
from octavo.checkpoint.run_state.state import WITHOUT_STATES, Restored, latest, load, not_finite
from octavo.checkpoint.run_state.weights import load_weights
from octavo.checkpoint.run_state.writing import Moment, save, take, write
from octavo.checkpoint.verify import verify
from octavo.checkpoint.verify.findings import Verified

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
