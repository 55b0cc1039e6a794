"""The page of a run, live and finished, and its plots."""
