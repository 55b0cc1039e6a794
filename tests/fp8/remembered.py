"""What layers of one input remember of it for each other."""

from __future__ import annotations

from octavo.fp8.dense import inputs


def held_bytes() -> int:
    """What the threads of this process remember for the next layer, whether saved for a backward as well or not."""
    entries = [entry for memo in list(inputs._thread_caches) if (entry := memo.entry) is not None]
    held = [t for e in entries for q in e.codes.values() for t in (q.data, q.scale)]
    held += [e.high for e in entries if e.high is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
