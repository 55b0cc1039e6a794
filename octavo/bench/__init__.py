"""Benchmarks of Octavo's kernels and layers on this machine, compared with other libraries.

    octavo bench linear                     one suite
    octavo bench all --out DIR              all suites; a JSON file for each
    octavo bench report DIR                 a table that compares results with the goals, and a plot

Needs torch and transformers; on a GPU also triton, which comes with CUDA builds of torch; matplotlib for the plot.
On a CPU the suites run at small sizes: they test the code, but their figures say nothing about the speed of FP8.
"""

from octavo.bench.bench import Bench
from octavo.bench.record import Result, load, table
from octavo.bench.suites import SUITES, BenchError, check_folder, report, run, write_suites

__all__ = ["SUITES", "Bench", "BenchError", "Result", "check_folder", "load", "report", "run", "table", "write_suites"]
