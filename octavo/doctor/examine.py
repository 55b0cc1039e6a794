"""Runs all checks in order, from what everything depends on to what is optional."""

from __future__ import annotations

from collections.abc import Callable

from octavo.base import environment
from octavo.doctor import fp8_backends, machine, packages
from octavo.doctor.report import FAIL, Check, Report


def examine(log: Callable[[str], None] = lambda text: None) -> Report:
    """Run all checks; ``log`` is called with the progress. Takes some seconds, because packages are imported."""
    checks: list[Check] = machine.versions()
    log("importing packages")
    # The imports run in a separate process while the rest is checked here.
    with packages.SharedImports(packages.REQUIRED + packages.OPTIONAL) as imports:
        torch = imports.check(next(package for package in packages.REQUIRED if package.distribution == "torch"))
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
        checks += [*imports.checks(packages.REQUIRED), *device_checks, *imports.checks(packages.OPTIONAL)]
    return Report(tuple(checks), record)
