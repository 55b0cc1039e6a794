"""One file a framework: what each of its keys becomes."""
