"""Runs all checks in order, from what everything depends on to what is optional."""

from __future__ import annotations

from collections.abc import Callable

from octavo.base import environment
from octavo.doctor import fp8_backends, machine, packages
from octavo.doctor.report import FAIL, Check, Report

STAGES = 5
"""Number of calls of ``log`` in :func:`examine`."""


def examine(log: Callable[[str], None] = lambda text: None, every_package: bool = True) -> Report:
    """Run all checks; ``log`` is called with the progress. Takes some seconds, because packages are imported; without
    ``every_package`` only torch is, and the others are checked by their versions."""
    checks: list[Check] = machine.versions()
    log("importing packages")
    required_torch = next(package for package in packages.REQUIRED if package.distribution == "torch")
    required = packages.REQUIRED if every_package else (required_torch,)
    optional = packages.OPTIONAL if every_package else ()
    # The imports run in a separate process while the rest is checked here.
    with packages.SharedImports(required + optional) as imports:
        torch = imports.check(required_torch)
        log("examining devices")
        record = environment.describe()
        device_checks = machine.devices(record)
        if torch.status == FAIL:
            why = f"not checked: torch does not import ({torch.found})"
            device_checks.append(Check("fp8", "all backends", FAIL, why, fix="repair the torch installation"))
        else:
            log("checking FP8 backends")
            device_checks += fp8_backends.backends()
            device_checks.append(fp8_backends.versions_tested())
            log("checking process groups")
            device_checks += machine.process_groups()
        device_checks += machine.storage()
        log("waiting for the imports")
        checks += [*imports.checks(required), *device_checks, *imports.checks(optional)]
    return Report(tuple(checks), record)
