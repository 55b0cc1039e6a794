"""Figures read from the files of a run, intervals, and the claims that they decide. No plotting."""
