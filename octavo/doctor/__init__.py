"""What this machine can run, what it cannot, and the fix.

``examine()`` tries things for real and never stops at the first failure: a broken torch is a line of the report.
"""

from octavo.doctor.examine import examine
from octavo.doctor.report import ABSENT, FAIL, OK, WARN, Check, Report

__all__ = ["ABSENT", "FAIL", "OK", "WARN", "Check", "Report", "examine"]
