"""Check kernels against the reference if torch or Triton is newer than the tested versions.

:data:`TESTED` lists the tested versions. If a newer version is installed, the kernels of a plan or an optimizer run on
small matrices on their device before they are used: casts must match bit for bit, products within rounding. The result
depends only on what the kernels compute, not on version numbers. If a kernel differs or does not run, the start fails
with a :class:`SelfCheckError` that has the kernel, the coordinate, both values and the fix.

Each kernel is checked once per device, driver, torch, Triton and digest of the kernel sources. ``self_check.json`` in
the cache folder (``OCTAVO_CACHE``, by default ``octavo`` in the user's cache folder) records the checks that passed
and the kernels that differed: these are checked again at each start, with tested versions, too, and plans name them.
``octavo doctor`` checks all kernels of a GPU with any version. No further check begins after :data:`LIMIT_S`; the
remaining checks run first at the next start. Checks never run during a capture or a compilation, and only on the first
rank of a node.

:mod:`octavo.fp8.self_check.reference_checks` has the checks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from octavo.base import accelerator, atomic_write
from octavo.base.env_vars import cache_home
from octavo.fp8.kernels.capture import is_capturing
from octavo.fp8.kernels.registry import BackendError

TESTED: dict[str, tuple[int, int]] = {"torch": (2, 13), "triton": (3, 7)}
"""The newest versions, major and minor, that the project's tests completed with."""
LIMIT_S = 5.0
FILE, _FORMAT = "self_check.json", 1


class SelfCheckError(BackendError):
    """With an untested version, the results of a kernel differ from the reference."""


class Mismatch(NamedTuple):
    """The largest difference between a kernel and the reference: the compared tensor, the coordinate, both values and
    the allowed difference, which is 0 if the bits must be equal."""

    what: str
    at: tuple[int, ...]
    value: float
    expected: float
    allowed: float

    def __str__(self) -> str:
        near = "the same bits" if not self.allowed else f"within {self.allowed:.3g}"
        return f"{self.what} at {list(self.at)} is {self.value:.6g}, the reference has {self.expected:.6g} ({near})"


Check = Callable[[], "Mismatch | None"]


# --- untested versions, and the record of checks ----------------------------------------------------------------------


@lru_cache(maxsize=1)
def installed_versions() -> dict[str, str]:
    """Return the installed versions of the packages in :data:`TESTED`."""
    versions = {"torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # without the package, no Triton kernel can run
        versions["triton"] = importlib.metadata.version("triton")
    return versions


def find_untested() -> tuple[str, ...]:
    """Return packages that are newer than tested, such as ``torch 2.15.0 (tested up to 2.13)``."""
    untested = []
    for package, version in installed_versions().items():
        numbers = re.match(r"(\d+)\.(\d+)", version)
        tested = TESTED[package]
        if numbers is None or (int(numbers[1]), int(numbers[2])) > tested:
            untested.append(f"{package} {version} (tested up to {tested[0]}.{tested[1]})")
    return tuple(untested)


@dataclass(frozen=True)
class Machine:
    """The environment that a check is valid for."""

    device: str
    driver: str
    versions: str
    kernels: str

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        properties = accelerator.properties(device) if accelerator.has_own_memory(device) else {"name": device.type}
        name = " ".join(str(properties[key]) for key in ("name", "capability") if properties.get(key))
        driver = Path("/proc/driver/nvidia/version")
        driver_text = driver.read_text(errors="replace").splitlines()[0] if driver.exists() else ""
        versions = ", ".join(f"{package} {version}" for package, version in installed_versions().items())
        return cls(name, driver_text, versions, _digest())


@lru_cache(maxsize=1)
def _digest() -> str:
    """Return a digest of the sources that define what kernels compute."""
    digest, folder = hashlib.sha256(), Path(__file__).parents[2]
    packages = ("arithmetic", "dense", "kernels", "self_check")
    sources = [file for package in packages for file in sorted((folder / "fp8" / package).rglob("*.py"))]
    # Checks are recorded by the names of recipes, whose casts this table defines.
    for file in (*sources, folder / "base" / "recipe_specs.py"):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def record_file() -> Path:
    """Return the path of the file that records which checks passed."""
    return cache_home() / FILE


def load_passed(machine: Machine) -> set[str]:
    """Return the names of the checks that passed on this machine."""
    return {name for entry in _entries() if entry.get("machine") == vars(machine) for name in entry.get("passed", ())}


def failed_checks(device: torch.device) -> dict[str, str]:
    """Return the kernels that computed wrong results on this machine, by the name of the check, with the result."""
    if not record_file().exists() or not _may_run(device):
        return {}
    return _failures(Machine.here(device))


def _failures(machine: Machine) -> dict[str, str]:
    here = [entry.get("failed") for entry in _entries() if entry.get("machine") == vars(machine)]
    return {name: str(text) for failed in here if isinstance(failed, dict) for name, text in failed.items()}


def _entries() -> list[dict[str, Any]]:
    """Return the entries of the record; none if it is unreadable: then all checks run again and replace it."""
    try:
        record = json.loads(record_file().read_text(encoding="utf-8"))
        entries = record["machines"] if record["octavo_self_check"] == _FORMAT else []
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("passed"), list)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _record(machine: Machine, names: Iterable[str], failed: tuple[str, str] | None = None) -> None:
    """Add checks that passed, and one that failed, to the file, which is read again first because another process may
    have written to it."""
    names = set(names)
    failures = {name: text for name, text in _failures(machine).items() if name not in names}
    passed = load_passed(machine) | names
    if failed is not None:
        failures |= [failed]
        passed -= {failed[0]}
    entries = [entry for entry in _entries() if entry.get("machine") != vars(machine)]
    entry = {"machine": vars(machine), "passed": sorted(passed), "failed": failures}
    text = json.dumps({"octavo_self_check": _FORMAT, "machines": [*entries, entry]}, indent=1)
    try:
        record_file().parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write_text(record_file(), text + "\n", shared=True)
    except OSError as error:
        warnings.warn(
            f"the result of the kernel self-check cannot be saved ({error}); it will run at each start", stacklevel=3
        )


def may_be_due() -> bool:
    """Return whether :func:`run_checks` may run one, so that callers need not collect checks otherwise."""
    return bool(find_untested()) or record_file().exists()


_passed_here: set[tuple[torch.device, str]] = set()  # the checks that passed in this process


def run_checks(
    checks: dict[str, Check],
    device: torch.device,
    limit: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
    always: bool = False,
) -> tuple[str, ...]:
    """Run the checks that have not passed on this machine yet, if a version newer than tested is installed.

    With tested versions, only checks that failed on this machine before run again.

    Args:
        checks: by name; each returns a :class:`Mismatch` or None.
        device: the device of the checks.
        limit: no further check begins after this many seconds.
        clock: the time in seconds.
        always: run checks that have not passed yet with tested versions, too.

    Returns the names of the checks that completed. Raises SelfCheckError if a check finds a mismatch or fails to run.
    """
    remaining = [name for name in checks if (device, name) not in _passed_here]
    untested = find_untested()
    if not remaining or not (always or may_be_due()) or not _may_run(device):
        return ()
    machine = Machine.here(device)
    if not (untested or always):
        failed = _failures(machine)
        remaining = [name for name in remaining if name in failed]
    already_passed, start = load_passed(machine), clock()
    completed: list[str] = []
    for name in remaining:
        if name not in already_passed:
            # At least one check runs at each start, so that slow checks are completed, too.
            if completed and clock() - start > limit:
                break
            _run_check(name, checks[name], untested, machine)
            completed.append(name)
        _passed_here.add((device, name))
    if completed:
        _record(machine, completed)
    if unchecked := [name for name in remaining if (device, name) not in _passed_here]:
        warnings.warn(
            f"{' and '.join(untested)}: {len(unchecked)} of {len(checks)} kernels are not checked yet ({limit:g} s "
            f"are over; first {unchecked[0]}) and are used. `octavo doctor` checks all; the next start goes on.",
            stacklevel=3,
        )
    return tuple(completed)


def _may_run(device: torch.device) -> bool:
    """Return True on the first rank of a node, outside of captures and compilations, for a device of this machine."""
    if device.type == "meta" or os.environ.get("LOCAL_RANK", "0") != "0" or torch.compiler.is_compiling():
        return False
    if device.type != "cpu" and not accelerator.has_own_memory(accelerator.default_device()):
        return False
    return not is_capturing(device)


def _run_check(name: str, check: Check, untested: tuple[str, ...], machine: Machine) -> None:
    what = f"{' and '.join(untested) or machine.versions}: {name}"
    versions = ", ".join(f"{package} {'.'.join(map(str, tested))}" for package, tested in TESTED.items())
    fix = f"Use fp8.backend: reference (backend='reference' in a Policy), or a version that was tested: {versions}."
    try:
        # The caller may be in a fake or inference mode, but the check needs the real device.
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            mismatch = check()
    except Exception as error:  # an error of a compiler or a launch is a result to report
        lines = str(error).strip().splitlines() or [""]
        raise SelfCheckError(f"{what} does not run here ({type(error).__name__}: {lines[-1][:300]}). {fix}") from error
    if mismatch is not None:
        _record(machine, (), (name, str(mismatch)))
        raise SelfCheckError(f"{what} computes wrong results: {mismatch}. {fix}")
