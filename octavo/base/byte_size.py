"""Formats sizes in bytes for messages."""

from __future__ import annotations

_DECIMAL = ("B", "KB", "MB", "GB", "TB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size: float, binary: bool = False) -> str:
    """Return a size with three significant digits, in the largest unit in which it is at least 1: 0 B, 412 KB, 1.26 GB.

    The units are powers of 1000, as in settings and on disks; with `binary` powers of 1024, as tools for memory use.
    """
    factor, units = (1024, _BINARY) if binary else (1000, _DECIMAL)
    number = float(size)
    for unit in units[:-1]:
        if abs(number) < 999.5:  # rounds to at most 999
            return f"{number:.3g} {unit}"
        number /= factor
    return f"{number:.3g} {units[-1]}" if abs(number) < 999.5 else f"{number:,.0f} {units[-1]}"
