"""What lies on disk: the state of a run, saved whole or not at all, and model folders, examined."""

from octavo.checkpoint import rng
from octavo.checkpoint.dcp_safe import SafeReader
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.files import prune, steps, sweep
from octavo.checkpoint.hf import save_hf
from octavo.checkpoint.state import WITHOUT_STATES, Restored, latest, load, not_finite, save
from octavo.checkpoint.verify import verify
from octavo.checkpoint.verify.findings import Verified
from octavo.checkpoint.weights import load_weights

__all__ = [
    "CheckpointError",
    "WITHOUT_STATES",
    "Restored",
    "SafeReader",
    "Verified",
    "latest",
    "load",
    "load_weights",
    "not_finite",
    "prune",
    "rng",
    "save",
    "save_hf",
    "steps",
    "sweep",
    "verify",
]
