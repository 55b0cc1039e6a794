"""What Octavo's kernels and layers are worth on this machine: suites that time them beside everybody else's.

    octavo bench linear                     one suite
    octavo bench all --out DIR              all of them; JSON for each
    octavo bench report DIR                 a table against the figures to reach, and a plot

Needs torch and transformers; on a GPU also triton, which comes with CUDA builds of torch; matplotlib for the plot.
The same suites run on small sizes on a CPU, where the figures say nothing about FP8 but the code is the same.
"""

from octavo.bench.bench import Bench
from octavo.bench.record import Result, load, table
from octavo.bench.suites import SUITES, BenchError, folder, keep, report, run

__all__ = ["SUITES", "Bench", "BenchError", "Result", "folder", "keep", "load", "report", "run", "table"]
