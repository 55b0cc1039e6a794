"""Rendezvous: the ranks of a run meet in a store that may hold keys of earlier starts, and check that they agree.

torchrun's agents keep one store across restarts (`--max-restarts`, another number of nodes), and it still holds what
the former ranks wrote, such as addresses of processes that no longer exist. No variable of torchrun's identifies a
start on all nodes, so the ranks agree on a name for it. Each rank writes a new random word; rank 0 answers every word
with a random name, until each rank has registered under that name. Rank 0 also answers words of former starts, and
no process reads those answers.

The answer also holds WORLD_SIZE of rank 0. A rank with a different WORLD_SIZE reports it under the name and ends, and
so does rank 0 (:func:`meet`). Then the ranks compare their settings (:func:`agree`) before the first collective: ranks
with different settings would wait for collectives that others never enter, or silently train a mixture of both.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from octavo.parallel.errors import WorldError

LOOK = 0.02  # seconds between two polls of rank 0
LIVE = 3.0  # seconds between two polls of a running job's heartbeat, by a rank that has no answer yet
LINGER = 10.0  # seconds that rank 0 keeps the store up after a refusal, so that other ranks can read the reason
NAMED = 8  # ranks, and values, that a message names

Differences = Sequence[tuple[str, Mapping[str, Sequence[int]]]]
"""(key, value -> ranks with that value) for each key in which ranks differ."""


def meet(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """Return the part of `store` that only this start uses. All ranks call it.

    Raises RuntimeError if ranks do not appear within `timeout` seconds; on rank 0 it names them. Raises WorldError on
    every rank that has appeared if one of them has another WORLD_SIZE.
    """
    if rank == 0:
        return dist.PrefixStore(_collect_ranks(store, size, timeout), store)
    word = uuid4().hex
    store.set(f"knock/{rank}", word)
    answer = json.loads(_wait_for_answer(store, f"answer/{word}", rank, size, timeout))
    name = answer["name"]
    store.set(f"{name}/size/{rank}", str(size))
    if answer["size"] != size:
        raise WorldError(_sizes({0: answer["size"], rank: size}))
    return dist.PrefixStore(name, store)


def _collect_ranks(store: dist.Store, size: int, timeout: float) -> str:
    """Rank 0: answer words until every rank has registered; return the name of this start."""
    name, until = uuid4().hex, time.monotonic() + timeout
    answer = json.dumps({"name": name, "size": size})
    store.set("start", answer)
    words: dict[int, bytes] = {}
    sizes, missing, differ = {0: size}, list(range(1, size)), False
    while missing:
        for rank in [rank for rank in missing if store.check([f"{name}/size/{rank}"])]:
            sizes[rank] = int(store.get(f"{name}/size/{rank}"))
            missing.remove(rank)
        if not differ and set(sizes.values()) != {size}:
            # Wait for the ranks that exist only under the larger WORLD_SIZE too: they must read why they end.
            missing = [rank for rank in range(1, max(sizes.values())) if rank not in sizes]
            differ, until = True, min(until, time.monotonic() + LINGER)
        if missing and time.monotonic() > until:
            if differ:
                break
            raise RuntimeError(f"after {timeout:g} s these ranks had not come: {_listed(missing)}")
        for rank in (rank for rank in missing if store.check([f"knock/{rank}"])):
            word = store.get(f"knock/{rank}")
            if words.get(rank) != word:
                words[rank] = word
                store.set(f"answer/{word.decode()}", answer)
        if missing:
            time.sleep(LOOK)
    if differ:
        raise WorldError(_sizes(sizes))
    return name


def _wait_for_answer(store: dist.Store, key: str, rank: int, size: int, timeout: float) -> str:
    """Rank 0's answer. Raises WorldError if rank 0 already runs a job without this rank, and RuntimeError without an
    answer in time."""
    began = time.monotonic()
    beat, seen = b"", began
    # Polls, because store.wait prints warnings when it times out.
    while not store.check([key]):
        if (now := time.monotonic()) - began > timeout:
            raise RuntimeError(f"rank 0 has not answered within {timeout:g} s")
        if now - seen > LIVE and store.check(["start"]):
            # Only a run whose heartbeat changes counts: keys of former starts stay in the store.
            start = json.loads(store.get("start"))
            pulse = f"{start['name']}/pulse_0"
            last, beat, seen = beat, store.get(pulse) if store.check([pulse]) else b"", now
            if start["size"] <= rank and last and beat != last:
                raise WorldError(_sizes({0: start["size"], rank: size}))
        time.sleep(min(0.5, LOOK + (now - began) / 20))
    return str(store.get(key).decode())


def agree(store: dist.Store, rank: int, size: int, facts: Mapping[str, str], timeout: float) -> Differences:
    """The differences between the facts of the ranks, on every rank; empty if they are equal. All ranks call it, with
    the store that :func:`meet` returned. Each sends a digest; rank 0 reads the facts only where a digest differs."""
    mine = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(mine.encode()).hexdigest()
    wait = timedelta(seconds=timeout)
    if rank:
        store.set(f"facts/{rank}", mine)
        store.set(f"digest/{rank}", digest)
        store.wait(["differences"], wait)
        differences: Differences = json.loads(store.get("differences"))
        store.set(f"read/{rank}", "")
        return differences
    others = range(1, size)
    store.wait([f"digest/{other}" for other in others], wait)
    odd = [other for other in others if store.get(f"digest/{other}").decode() != digest]
    every = {other: json.loads(store.get(f"facts/{other}")) if other in odd else facts for other in range(size)}
    differences = _differences(every)
    store.set("differences", json.dumps(differences))
    if differences:  # the store ends with this process
        until = time.monotonic() + LINGER
        while time.monotonic() < until and not store.check([f"read/{other}" for other in others]):
            time.sleep(LOOK)
    return differences


def _differences(every: Mapping[int, Mapping[str, str]]) -> Differences:
    keys = dict.fromkeys(key for facts in every.values() for key in facts)
    different: list[tuple[str, Mapping[str, Sequence[int]]]] = []
    for key in keys:
        values: dict[str, list[int]] = {}
        for rank, facts in every.items():
            values.setdefault(facts.get(key, "absent"), []).append(rank)
        if len(values) > 1:
            different.append((key, values))
    return different


def in_words(differences: Differences, keys: int = 4) -> str:
    """The first ``keys`` differences: "train.lr is 0.001 on rank 0 and 0.002 on rank 1; ..."."""
    clauses = []
    for key, values in differences[:keys]:
        parts = [f"{value} on {_ranks(ranks)}" for value, ranks in [*values.items()][:NAMED]]
        clauses.append(f"{key} is {', '.join(parts[:-1])} and {parts[-1]}")
    rest = len(differences) - keys
    return "; ".join(clauses) + (f"; and {rest} more" if rest > 0 else "")


def _sizes(sizes: Mapping[int, int]) -> str:
    values: dict[str, list[int]] = {}
    for rank, size in sorted(sizes.items()):
        values.setdefault(str(size), []).append(rank)
    return (
        f"the ranks were started for different numbers of ranks: {in_words([('WORLD_SIZE', values)])}. Start all of "
        "them with the same WORLD_SIZE (torchrun: the same --nnodes and --nproc-per-node)"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:NAMED])) + (", ..." if len(ranks) > NAMED else "")
