"""How the bytes of a file become rows: one entry a format; knows no cache and no network."""
