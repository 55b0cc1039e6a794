"""Rendezvous: the ranks of a run meet in a store that may hold keys of earlier starts, and compare
their settings.

torchrun's agents keep one store across restarts (`--max-restarts`, another number of nodes), and it still holds what
earlier ranks wrote, such as addresses of processes that no longer exist. No variable of torchrun's identifies a
start on all nodes, so the ranks agree on a name for it. Each rank writes a new random word; rank 0 answers every word
with a random name, until each rank has registered under that name. Rank 0 also answers words of earlier starts; no
process reads those answers.

The answer also contains rank 0's WORLD_SIZE. A rank with a different WORLD_SIZE reports it under the name and exits,
and so does rank 0 (:func:`meet`). Then the ranks compare their settings (:func:`compare_facts`) before the first
collective: ranks with different settings would wait for collectives that others never enter, or silently train a
mixture of both.
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

POLL_SECONDS = 0.02  # seconds between two polls of rank 0
HEARTBEAT_SECONDS = 3.0  # seconds between two reads of a running job's heartbeat by a rank that has no answer yet
LINGER_SECONDS = 10.0  # seconds for which rank 0 keeps the store alive after an error, so that other ranks can read it
MAX_NAMED = 8  # ranks, and values, named in a message

Differences = Sequence[tuple[str, Mapping[str, Sequence[int]]]]
"""(key, value -> ranks with that value) for each key in which ranks differ."""


def meet(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """Return the part of `store` that only this start uses. All ranks call it.

    Raises RuntimeError if ranks do not appear within `timeout` seconds; rank 0 names them. Raises WorldError on every
    rank that has appeared if one of them has a different WORLD_SIZE.
    """
    if rank == 0:
        return dist.PrefixStore(_collect_ranks(store, size, timeout), store)
    word = uuid4().hex
    store.set(f"knock/{rank}", word)
    answer = json.loads(_wait_for_answer(store, f"answer/{word}", rank, size, timeout))
    name = answer["name"]
    store.set(f"{name}/size/{rank}", str(size))
    if answer["size"] != size:
        raise WorldError(_size_error({0: answer["size"], rank: size}))
    return dist.PrefixStore(name, store)


def _collect_ranks(store: dist.Store, size: int, timeout: float) -> str:
    """Answer words on rank 0 until every rank has registered; return the name of this start."""
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
            # Also wait for the ranks that exist only under the larger WORLD_SIZE: they must read the reason.
            missing = [rank for rank in range(1, max(sizes.values())) if rank not in sizes]
            differ, until = True, min(until, time.monotonic() + LINGER_SECONDS)
        if missing and time.monotonic() > until:
            if differ:
                break
            raise RuntimeError(f"these ranks did not appear within {timeout:g} s: {_join_ranks(missing)}")
        for rank in (rank for rank in missing if store.check([f"knock/{rank}"])):
            word = store.get(f"knock/{rank}")
            if words.get(rank) != word:
                words[rank] = word
                store.set(f"answer/{word.decode()}", answer)
        if missing:
            time.sleep(POLL_SECONDS)
    if differ:
        raise WorldError(_size_error(sizes))
    return name


def _wait_for_answer(store: dist.Store, key: str, rank: int, size: int, timeout: float) -> str:
    """Return rank 0's answer. Raises WorldError if rank 0 already runs a job without this rank, and RuntimeError if
    there is no answer in time."""
    began = time.monotonic()
    beat, read_at = b"", began
    # Polls, because store.wait prints warnings when it times out.
    while not store.check([key]):
        if (now := time.monotonic()) - began > timeout:
            raise RuntimeError(f"rank 0 has not answered within {timeout:g} s")
        if now - read_at > HEARTBEAT_SECONDS and store.check(["start"]):
            # Only a run whose heartbeat changes is alive: keys of earlier starts stay in the store.
            start = json.loads(store.get("start"))
            key_of_beat = f"{start['name']}/heartbeat_0"
            last, beat, read_at = beat, store.get(key_of_beat) if store.check([key_of_beat]) else b"", now
            if start["size"] <= rank and last and beat != last:
                raise WorldError(_size_error({0: start["size"], rank: size}))
        time.sleep(min(0.5, POLL_SECONDS + (now - began) / 20))
    return str(store.get(key).decode())


def compare_facts(store: dist.Store, rank: int, size: int, facts: Mapping[str, str], timeout: float) -> Differences:
    """Return the differences between the facts of the ranks, on every rank; empty if they are equal. All ranks call it,
    with the store that :func:`meet` returned. Each sends a digest; rank 0 reads the facts only if a digest differs."""
    text = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    wait = timedelta(seconds=timeout)
    if rank:
        store.set(f"facts/{rank}", text)
        store.set(f"digest/{rank}", digest)
        store.wait(["differences"], wait)
        differences: Differences = json.loads(store.get("differences"))
        store.set(f"read/{rank}", "")
        return differences
    others = range(1, size)
    store.wait([f"digest/{other}" for other in others], wait)
    differing = [other for other in others if store.get(f"digest/{other}").decode() != digest]
    all_facts = {
        other: json.loads(store.get(f"facts/{other}")) if other in differing else facts for other in range(size)
    }
    differences = _find_differences(all_facts)
    store.set("differences", json.dumps(differences))
    if differences:  # the store ends with this process
        until = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < until and not store.check([f"read/{other}" for other in others]):
            time.sleep(POLL_SECONDS)
    return differences


def _find_differences(all_facts: Mapping[int, Mapping[str, str]]) -> Differences:
    keys = dict.fromkeys(key for facts in all_facts.values() for key in facts)
    different: list[tuple[str, Mapping[str, Sequence[int]]]] = []
    for key in keys:
        values: dict[str, list[int]] = {}
        for rank, facts in all_facts.items():
            values.setdefault(facts.get(key, "absent"), []).append(rank)
        if len(values) > 1:
            different.append((key, values))
    return different


def describe_differences(differences: Differences, keys: int = 4) -> str:
    """Describe the first ``keys`` differences: "train.lr is 0.001 on rank 0 and 0.002 on rank 1; ..."."""
    clauses = []
    for key, values in differences[:keys]:
        parts = [f"{value} on {_format_ranks(ranks)}" for value, ranks in [*values.items()][:MAX_NAMED]]
        clauses.append(f"{key} is {', '.join(parts[:-1])} and {parts[-1]}")
    rest = len(differences) - keys
    return "; ".join(clauses) + (f"; and {rest} more" if rest > 0 else "")


def _size_error(sizes: Mapping[int, int]) -> str:
    values: dict[str, list[int]] = {}
    for rank, size in sorted(sizes.items()):
        values.setdefault(str(size), []).append(rank)
    return (
        f"the ranks were started with different numbers of ranks: {describe_differences([('WORLD_SIZE', values)])}. "
        "Start all of them with the same WORLD_SIZE (torchrun: the same --nnodes and --nproc-per-node)"
    )


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_join_ranks(ranks)}"


def _join_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")
