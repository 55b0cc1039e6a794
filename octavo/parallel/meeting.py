"""How the ranks of a run find each other in a store that may be older than they are.

torchrun's agents keep one store while they start the processes anew (`--max-restarts`, another number of nodes), and
what the former ranks wrote is still in it: addresses of processes that are gone. No variable that torchrun sets tells
one start from the next on all nodes, so the ranks agree on a name themselves. Each knocks with a word that nobody has
used before; rank 0 answers to every word with the name that it has just made up, until each rank has come by that name.
What is left of former starts is answered too, and nobody listens.
"""

from __future__ import annotations

import time
from uuid import uuid4

import torch.distributed as dist

LOOK = 0.02  # seconds between two looks of rank 0
NAMED = 8  # ranks that a message names


def meet(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """The part of `store` that is of this start alone. All ranks call it.

    Raises RuntimeError where ranks do not come within `timeout` seconds; on rank 0 it names them.
    """
    if rank == 0:
        return dist.PrefixStore(_answer(store, size, timeout), store)
    word = uuid4().hex
    store.set(f"knock/{rank}", word)
    name = store.get(f"answer/{word}").decode()
    store.set(f"{name}/came/{rank}", "")
    return dist.PrefixStore(name, store)


def _answer(store: dist.Store, size: int, timeout: float) -> str:
    """Rank 0's part; the name that it gave."""
    name, until = uuid4().hex, time.monotonic() + timeout
    heard: dict[int, bytes] = {}
    missing = list(range(1, size))
    while missing := [rank for rank in missing if not store.check([f"{name}/came/{rank}"])]:
        if time.monotonic() > until:
            more = ", ..." if len(missing) > NAMED else ""
            raise RuntimeError(f"after {timeout:g} s these ranks had not come: {str(missing[:NAMED])[1:-1]}{more}")
        for rank in (rank for rank in missing if store.check([f"knock/{rank}"])):
            word = store.get(f"knock/{rank}")
            if heard.get(rank) != word:
                heard[rank] = word
                store.set(f"answer/{word.decode()}", name)
        time.sleep(LOOK)
    return name
