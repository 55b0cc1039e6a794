"""The round: every check in order, from what everything stands on to what is merely nice to have."""

from __future__ import annotations

from collections.abc import Callable

from octavo import environment
from octavo.doctor import arithmetic, machine, packages
from octavo.doctor.report import FAIL, Check, Report


def examine(say: Callable[[str], None] = lambda text: None) -> Report:
    """Tries everything; ``say`` is told what is being tried. Takes some seconds, for the imports are real."""
    checks: list[Check] = machine.versions()
    say("importing packages")
    checks += packages.imports(packages.REQUIRED)
    broken = {check.name for check in checks if check.area == "imports" and check.status == FAIL}
    say("looking at devices")
    record = environment.describe()
    checks += machine.devices(record)
    if "torch" in broken:
        cause = next(check.found for check in checks if check.area == "imports" and check.name == "torch")
        checks.append(
            Check("fp8", "all backends", FAIL, f"not tried: torch does not import ({cause})", cure="mend torch")
        )
    else:
        say("trying FP8 backends")
        checks += arithmetic.backends()
        say("trying process groups")
        checks += machine.process_groups()
    checks += machine.storage()
    say("importing optional packages")
    checks += packages.imports(packages.OPTIONAL)
    return Report(tuple(checks), record)
