"""The self-check: kernels are compared with the reference before they are used with versions that were not tested."""

from octavo.fp8.self_check.reference_checks import adamw_checks, fused_checks, kernel_checks
from octavo.fp8.self_check.untested import (
    TESTED,
    SelfCheckError,
    failed_checks,
    find_untested,
    installed_versions,
    run_checks,
)

__all__ = [
    "TESTED", "SelfCheckError", "adamw_checks", "find_untested", "fused_checks", "installed_versions", "kernel_checks",
    "failed_checks", "run_checks",
]  # fmt: skip
