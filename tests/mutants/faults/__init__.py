"""Single faults that somebody could make, and the tests that ought to notice: what ``run.py`` plants.

A fragment is short and says arithmetic or logic, so that it survives moves, renames and formatting; it stands once in
its file (white space between words does not count). Where code changes so that a fragment is gone, give the fault the
fragment that says the same now and keep its name, by which results are compared. A fault that changes nothing anybody
could see is none: replace it. The tests are those that should fail, narrow enough to tell within seconds.
"""

from faults import arithmetic, cost, families, nvila, onevision, packing, plans, runs  # each enters its own
from faults.fault import FAULTS, Fault

__all__ = ["FAULTS", "Fault", "arithmetic", "cost", "families", "nvila", "onevision", "packing", "plans", "runs"]
