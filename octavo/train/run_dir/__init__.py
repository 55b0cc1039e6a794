"""The files of a run, its lock, and what its directory may be entered with; knows no model."""
