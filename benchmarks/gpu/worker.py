"""A process of a job: runs a test file or a suite, and reports each case before and after it as a JSON line.

The job is read from stdin; events are written to a separate pipe, so that output and a full disk cannot disturb them.
The events:

    {"device", "machine"}              the device and machine
    {"begins": [case, candidates]}     these run now, and are lost if the process is
    {"ready": device}                  a suite can compute on its device
    {"gone": why}                      it cannot, so no later process can either
    {"rows", "absent", "cut"}          the results of a case of a suite
    {"collected": number of tests}, then for each test {"test": [node, outcome, seconds, why]}
    {"broken": why}                    the GPU is lost to this process, which exits; the rest needs a new process
    {"over": exit code}                the process finished by itself; MORE: another one has to do the rest
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import Any

BROKEN = 70
MORE = 71
KEPT = 1500  # characters of what a test failed with

Send = Callable[..., None]


def main() -> int:
    began = time.monotonic()
    order = json.load(sys.stdin)
    with suppress(OSError, AttributeError):  # Linux: the end of who waits for the lines is the end of this process
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    pipe = os.fdopen(order["pipe"], "w", encoding="utf-8")

    def send(**event: Any) -> None:
        try:
            pipe.write(json.dumps(event, default=str) + "\n")
            pipe.flush()
        except OSError:  # the parent has closed the pipe
            os._exit(BROKEN)

    if order["kind"] == "where":
        code = where(send)
    elif order["kind"] == "tests":
        code = tests(order, send)
    else:
        code = suite(order, send, began)
    send(over=code)
    return code


def where(send: Send) -> int:
    """Which device there is, and what machine and versions this is."""
    import torch

    from octavo.bench import record

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    send(device=device, machine=record.describe_machine())
    return 0


def suite(order: dict[str, Any], send: Send, began: float) -> int:
    """A suite of `octavo bench`, within the seconds that the order leaves it."""
    import torch

    from octavo.base import accelerator
    from octavo.bench.bench import Bench
    from octavo.bench.record import Result

    device = torch.device(order["device"])
    if why := lost_device(device):
        send(gone=why)
        return BROKEN
    send(ready=str(device))
    sent = {"rows": 0, "absent": 0, "cut": 0}

    def found(result: Result) -> None:
        new = {key: getattr(result, key)[count:] for key, count in sent.items()}
        sent.update({key: sent[key] + len(lines) for key, lines in new.items()})
        new.update({key: [asdict(line) for line in new[key]] for key in ("rows", "absent")})
        send(**new)

    bench = Bench(
        device,
        small=order["small"],
        log=lambda text: print(text, flush=True),
        on_candidates=lambda case, candidates: send(begins=[case, list(candidates)]),
        on_result=found,
        skip={(case, candidate) for case, candidate in order["skip"]},
        **order.get("settings", {}),
        apart=order.get("apart", False),
    )
    if bench.small:  # small sizes are the suites'; fewer blocks than all stay another case
        bench.layers, bench.tokens = 1 if bench.layers else None, None
    words = {"high": bench.high, "backend": "torch" if accelerator.is_gpu(device) else "reference"}
    bench.candidates = [name.format(**words) for name in bench.candidates]
    run = import_module(order["target"]).run
    bench.budget = order["seconds"] - (time.monotonic() - began)
    bench.start_budget()
    run(bench)
    return MORE if bench.unfinished else 0


def lost_device(device: Any) -> str | None:
    """Why this process cannot compute on its device, None if it can."""
    import torch

    from octavo.base import accelerator

    try:
        torch.ones(2, device=device).sum().item()
        accelerator.synchronize(device)
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def tests(order: dict[str, Any], send: Send) -> int:
    """A test file, less the tests that earlier processes ran or died of. Returns pytest's exit code."""
    import pytest

    words = ["-q", "--no-header", "--no-summary", "--tb=short", "--capture=tee-sys", "-p", "no:cacheprovider"]
    return int(pytest.main([*words, order["target"]], plugins=[_Watch(set(order["skip"]), send)]))


class _Watch:
    """The plugin that reports each test."""

    def __init__(self, skip: set[str], send: Send) -> None:
        self.skip, self.send = skip, send
        self.outcome, self.seconds, self.why = "passed", 0.0, ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.skip]
        self.send(collected=len(items) + len(self.skip))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.send(test=[report.nodeid, "failed", 0.0, report.longreprtext[-KEPT:]])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.seconds, self.why = "passed", 0.0, ""
        self.send(begins=[nodeid, []])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds += report.duration
        if not report.passed and self.outcome != "failed":
            skipped = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-KEPT:]
            self.outcome, self.why = report.outcome, skipped
        if report.when == "teardown":
            self.send(test=[report.nodeid, self.outcome, round(self.seconds, 3), self.why])
            if self.outcome == "failed" and (why := lost_gpu()):
                self.send(broken=why)
                os._exit(BROKEN)


def lost_gpu() -> str | None:
    """Why this process can use its GPU no more (an illegal access poisons the context), None where it can."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


if __name__ == "__main__":
    sys.exit(main())
