"""Shared by all tests: one thread, no network, no colours, the same hypothesis examples at every run."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if not torch.cuda.is_available():  # before triton is imported: kernels then run on the CPU, in its interpreter
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import settings

torch.set_num_threads(1)
# A change is judged by what it does, not by which example was drawn this time.
settings.register_profile("octavo", derandomize=True)
settings.load_profile("octavo")

pytest_plugins = ["tests.cpu_budget"]  # what the tests cost, and the ten dearest


@pytest.fixture(autouse=True, scope="module")
def _collect_what_is_new() -> None:
    """Objects of imported modules, half a million, are set apart: a collection then looks at those of the tests. The
    accountant of saved bytes collects in every run, and so do tests of what dies when: milliseconds, not half a second.
    """
    gc.collect()
    gc.freeze()
