"""The trial and its report: compares FP8 with high precision on the same data and writes one page.

``compare`` trains the runs and writes ``report.html``, ``report.json`` and PNG plots; ``judge`` turns finished runs
into a ``Verdict``; ``demo.run`` runs a trial on the bundled handwritten digits.
"""

from octavo.report.evidence.run_reader import LayerHealth, ReportError, RunRecord, read
from octavo.report.evidence.trial_spec import Run, Trial
from octavo.report.evidence.trust_table import Check
from octavo.report.trial.compare import compare
from octavo.report.trial.judge import Verdict, judge

__all__ = ["Check", "LayerHealth", "ReportError", "Run", "RunRecord", "Trial", "Verdict", "compare", "judge", "read"]
