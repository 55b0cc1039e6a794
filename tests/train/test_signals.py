"""A second Ctrl-C ends a run at once and without a traceback, wherever it comes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from octavo.checkpoint.run_state.collective_errors import dcp_errors
from octavo.train.callbacks.signals import StopRequest


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_second_interrupt_is_raised_and_writes_nothing(capfd: pytest.CaptureFixture[str]):
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), StopRequest(60) as request:
        interrupt()
        assert request.signal == signal.SIGINT
        time.sleep(0.1)  # most of the time the thread that limits the wait has taken the first one
        interrupt()
    assert capfd.readouterr() == ("", "") and sys.unraisablehook is before


def test_signals_of_another_kind_after_the_first_write_nothing(capfd: pytest.CaptureFixture[str]):
    with StopRequest(60) as request:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
    assert request.signal == signal.SIGTERM and capfd.readouterr().err == ""


@pytest.mark.parametrize("where", ["__del__", "a callback of the collector"])
def test_an_interrupt_where_python_drops_exceptions_is_raised_later(where: str, capfd: pytest.CaptureFixture[str]):
    class Closes:
        def __del__(self) -> None:
            interrupt()
            sum(range(100))  # signals are handled between two instructions

    def callback(phase: str, info: object) -> None:
        gc.callbacks.remove(callback)
        interrupt()
        sum(range(100))

    with pytest.raises(KeyboardInterrupt), StopRequest(60):
        interrupt()
        if where == "__del__":
            Closes()
        else:
            gc.callbacks.append(callback)
            gc.collect()
        for _ in range(600):
            time.sleep(0.1)
    assert capfd.readouterr().err == ""


def test_other_dropped_exceptions_are_written_as_ever(capfd: pytest.CaptureFixture[str]):
    class Fails:
        def __del__(self) -> None:
            raise ValueError("dropped")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest's collects them
        with StopRequest(60):
            Fails()
    assert "ValueError: dropped" in capfd.readouterr().err


def test_an_interrupt_while_a_checkpoint_is_written_is_no_error_of_the_checkpoint():
    """DCP wraps it as it wraps what fails."""
    with pytest.raises(KeyboardInterrupt), dcp_errors("write", Path("step_1")):
        raise CheckpointException("save", {0: (KeyboardInterrupt(), None)})
