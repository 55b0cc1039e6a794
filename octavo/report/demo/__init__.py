"""The demo: a trial on handwriting that needs nothing but the package, and what it can decide."""
