"""Shared by all tests: one thread, waits asleep, no network or colours, the same hypothesis examples at every run."""

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin for each other cost a busy machine 30 times
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

if not torch.cuda.is_available():  # before triton is imported: kernels then run on the CPU, in its interpreter
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
from hypothesis import settings

from octavo.base import accelerator, encryption

NEEDS = ("real", "server")  # markers of tests that are counted


def _count_frozen_once() -> None:
    """How many objects are frozen is counted by going through them, and here a million are. Every run asks, twice; what
    was counted is true until somebody freezes or thaws again."""
    freeze, unfreeze, count = gc.freeze, gc.unfreeze, gc.get_freeze_count
    known: list[int] = []

    def forget(change: Callable[[], None]) -> Callable[[], None]:
        def changed() -> None:
            change()
            known.clear()

        return changed

    def counted() -> int:
        if not known:
            known.append(count())
        return known[0]

    gc.freeze, gc.unfreeze, gc.get_freeze_count = forget(freeze), forget(unfreeze), counted


_count_frozen_once()  # before the rest of octavo is imported, which keeps one of these functions
torch.set_num_threads(1)
logging.disable(logging.DEBUG)  # torch logs twice for each tensor that it saves, and nobody reads it
gc.disable()  # until all tests are collected: modules and tests stay, and going through them is half of what that costs
# A shell's background jobs, and what nohup starts, ignore these signals, and children inherit it.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
# A change is judged by what it does, not by which example was drawn this time.
settings.register_profile("octavo", derandomize=True)
settings.load_profile("octavo")

pytest_plugins = ["tests.cpu_budget", "tests.flaky"]  # what tests cost; what failed, and which may be run again
LIKE_OTHERS = ("glm46v", "glm_ocr", "qwen2_vl")
"""Families whose layers, inputs and masks are those of glm4v and qwen2_5_vl, under names of their own: what `make test`
says of these holds for them, and `make test-long` tries them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if given.get("family") in LIKE_OTHERS:
            item.add_marker(pytest.mark.long)
        # Not the keywords of a report, which also have the names of folders.
        item.user_properties += [("needs", name) for name in NEEDS if item.get_closest_marker(name)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collection ends: what there is now is set apart, and garbage is looked for again."""
    try:
        return (yield)
    finally:
        if "transformers" in sys.modules:  # it renders every configuration that it reads, for a log at a level unseen
            sys.modules["transformers"].PreTrainedConfig.__repr__ = object.__repr__
        if "torch._dynamo.guards" in sys.modules:  # it empties the CPU's caches, then times each new graph's guards
            sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *guards: 0.0
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests used a real model or a server: in CI a silent zero would mean that nothing was tried."""
    passed = terminalreporter.stats.get("passed", ())
    counts = {name: sum(("needs", name) in report.user_properties for report in passed) for name in NEEDS}
    if any(counts.values()):
        terminalreporter.write_line(f"on real weights: {counts['real']}, in the server: {counts['server']}")


def pytest_unconfigure() -> None:
    """What still lives dies with the process: pytest and the interpreter would go through it six times more."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is made of data files stays out of the user's folder, in child processes too."""
    os.environ["OCTAVO_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _no_key_stays() -> Iterator[None]:
    """The command line hands a key on by the environment, which is that of the tests behind it too."""
    yield
    for name in (encryption.FILE, encryption.VALUE):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True, scope="module")
def _collect_what_is_new() -> None:
    """Objects of imported modules, half a million, are set apart: a collection then looks at those of the tests. The
    accountant of saved bytes collects in every run, and so do tests of what dies when: milliseconds, not half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter products of two tiles are exact sums, rounded once. numpy's own give a row other last
    bits at another place of a tile; a tensor core's are not seen here. What is left to depend on rows is the kernel's
    doing."""
    own = np.matmul

    def product(a: np.ndarray, b: np.ndarray, dtype: type) -> np.ndarray:
        return own(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", product)


@pytest.fixture
def torch_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products in high precision be torch's on every CPU, for tests that compare bits with stock layers."""
    monkeypatch.setattr(accelerator, "multiplies_on_cpu", lambda dtype: True)


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and trials whose runs draw no pages, a second each. These are for report/test_run_page.py, and that runs
    write them for train/test_watchers.py and cli/test_commands.py."""
    from octavo.report.run import run_page

    monkeypatch.setattr(run_page, "write_page", lambda *given: None)


class Everything(set):
    """Holds whatever is asked for."""

    def __contains__(self, key: object) -> bool:
        return True


@pytest.fixture
def row_kernels(exact_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU rows are computed as on a GPU, by the kernels whose rows stand for themselves, in the interpreter.
    Nothing is tried first, which there takes longer than what is asked for."""
    from octavo.fp8 import invariance
    from octavo.fp8.kernels import triton_backend
    from tests import interpreter

    interpreter.make_quicker()
    monkeypatch.setitem(invariance.KERNELS, "cpu", triton_backend.row_kernels)
    monkeypatch.setattr(invariance.devices, "_proven", Everything())


@pytest.fixture(scope="session")
def fp8_exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a mini Qwen3 (plain/), its exports in blocks and rows (block/, dynamic/), and rows.json; read
    only."""
    from octavo.models.tiny import tiny
    from octavo.train.artifacts import export_model

    folder = tmp_path_factory.mktemp("fp8_exports")
    tiny.write("qwen3", folder / "plain", size="mini")
    for kind in ("block", "dynamic"):
        export_model(folder / "plain", folder / kind, f"fp8-{kind}")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "rows.json").write_text(json.dumps([{"messages": turns}] * 4))
    return folder


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`octavo plan` without its memory prediction, which takes a second; that is for cli/test_plan_memory.py."""
    from octavo.cli import plan_memory

    monkeypatch.setattr(plan_memory, "as_json", lambda *_: {})
    monkeypatch.setattr(plan_memory, "show", lambda *_: None)
