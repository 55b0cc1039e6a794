"""The round: every check in order, from what everything stands on to what is merely nice to have."""

from __future__ import annotations

from collections.abc import Callable

from octavo.base import environment
from octavo.doctor import fp8_backends, machine, packages
from octavo.doctor.report import FAIL, Check, Report


def examine(say: Callable[[str], None] = lambda text: None) -> Report:
    """Tries everything; ``say`` gets what is being tried. Takes some seconds, for the imports are real."""
    checks: list[Check] = machine.versions()
    say("importing packages")
    # Its imports go on while the rest is tried here.
    with packages.Together(packages.REQUIRED + packages.OPTIONAL) as together:
        torch = together.check(next(package for package in packages.REQUIRED if package.distribution == "torch"))
        say("looking at devices")
        record = environment.describe()
        found = machine.devices(record)
        if torch.status == FAIL:
            why = f"not tried: torch does not import ({torch.found})"
            found.append(Check("fp8", "all backends", FAIL, why, fix="mend torch"))
        else:
            say("trying FP8 backends")
            found += fp8_backends.backends()
            found.append(fp8_backends.versions_tested())
            say("trying process groups")
            found += machine.process_groups()
        found += machine.storage()
        say("waiting for the imports")
        checks += [*together.checks(packages.REQUIRED), *found, *together.checks(packages.OPTIONAL)]
    return Report(tuple(checks), record)
