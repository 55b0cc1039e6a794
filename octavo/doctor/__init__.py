"""Reports what this machine can run, what it cannot, and how to fix it.

``examine()`` runs each check and continues after failures: a broken torch is one line of the report.
"""

from octavo.doctor.examine import STAGES, examine
from octavo.doctor.report import ABSENT, FAIL, OK, WARN, Check, Report

__all__ = ["ABSENT", "FAIL", "OK", "STAGES", "WARN", "Check", "Report", "examine"]
