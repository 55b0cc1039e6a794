"""The trial and its report: FP8 beside high precision on the same data, judged, drawn and written as one page.

``compare`` trains the runs and writes ``report.html``, ``report.json`` and PNG plots; ``judge`` alone turns finished
runs into a ``Verdict``; ``demo.run`` is the whole story on the embedded handwritten digits.
"""

from octavo.report.evidence.run_reader import LayerHealth, ReportError, RunRecord, read
from octavo.report.evidence.trial_spec import Run, Trial
from octavo.report.evidence.trust_table import Check
from octavo.report.trial.compare import compare
from octavo.report.trial.judge import Verdict, judge

__all__ = ["Check", "LayerHealth", "ReportError", "Run", "RunRecord", "Trial", "Verdict", "compare", "judge", "read"]
