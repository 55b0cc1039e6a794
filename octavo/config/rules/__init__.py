"""Rules on combinations of keys of several sections."""
