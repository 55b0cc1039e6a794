"""The memory output of `octavo plan`: the table by kind, whether it fits, possible savings, and --fit."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.cli import arguments, terminal
from octavo.train.estimate.memory import (
    ASSUMED,
    KINDS,
    Card,
    MemoryEstimator,
    Switch,
    configured_settings,
    gb,
    propose,
    savings,
)
from octavo.train.setup.token_counts import assume_tokens

RL_KINDS = ("reference", "kv_cache")  # only in phases rl and preference


def predicted(
    cfg: Any, model: Any, family: Any, plan: Any, counted: Any, card: str | None = None, reference: str | None = None
) -> tuple[Any, str]:
    """Return (memory predictor of this model, message about the assumed tokens). ``card``: the memory that rollouts
    must fit in; ``reference``: base, copy or none."""
    if counted is None:
        tokens, message = assume_tokens(cfg, family.components, model.config)
    else:
        counts = ", ".join(f"{name} {n}" for name, n in counted.counts.items())
        tokens, message = counted, f"tokens of one micro-batch: {counts}"
    usable = None if card is None else Card.parse(card).usable
    return MemoryEstimator(cfg, model, family, plan, tokens, copy=reference == "copy", usable=usable), message


def as_json(sizes: Any, message: str, args: Any) -> dict[str, Any]:
    """Return the content of `show` as JSON."""
    report: dict[str, Any] = {"tokens": message, **sizes.estimate(sizes.cfg, 1).to_json()}
    if args.ranks > 1:
        report["per_rank"] = sizes.estimate(sizes.cfg, args.ranks).to_json()
    card = Card.parse(args.card) if args.card else None
    if card is not None:
        over = sizes.estimate(sizes.cfg, args.ranks).total - card.usable
        report["card"] = {
            "name": card.name,
            "bytes": card.size,
            "reserve": card.reserve,
            "free": -over,
            "fits": over <= 0,
        }
    report["switches"] = [switch.to_json() for switch in _savings(sizes, args)]
    return report


def _savings(sizes: MemoryEstimator, args: argparse.Namespace) -> list[Switch]:
    with terminal.progress("memory switches", bytes=False) as progress:
        return list(savings(sizes, args.ranks, progress))


def line(sizes: Any, args: Any) -> str:
    """Return one line: the predicted memory, and whether it fits."""
    total = sizes.estimate(sizes.cfg, args.ranks).total
    where = f"each of {args.ranks} GPUs" if args.ranks > 1 else "one GPU"
    return (
        f"memory: {gb(total)} on {where}, predicted"
        if not args.card
        else fits(Card.parse(args.card), total, args.ranks)
    )


def show(sizes: Any, message: str, args: Any) -> None:
    """Print the table, whether the run fits, and the savings of each switch."""
    one = sizes.estimate(sizes.cfg, 1)
    footprints = {"one GPU": one}
    if args.ranks > 1:
        footprints[f"each of {args.ranks}"] = sizes.estimate(sizes.cfg, args.ranks)
    _table(footprints)
    print()
    print(message)
    # A rollout runs on one rank, which is the last footprint.
    last = [*footprints.values()][-1]
    if last.rollout is not None:
        print(_describe_rollout(last.rollout, sizes.cfg, args.card))
    if not args.card:
        print("add --card SIZE, e.g. --card 80GB, to see whether it fits and what each memory switch saves")
        return
    listed = _savings(sizes, args)
    if listed:
        print()
        terminal.show_table(
            ("switch", "to", "saves", "cost"),
            [
                (s.key, f"{_word(s.value)} (on)" if s.on else _word(s.value), _saved(s.bytes), s.cost)
                for s in listed
                if s.bytes >= 1e6 or s.on
            ],
            right=(2,),
        )


def _table(footprints: Mapping[str, Any]) -> None:
    """Print the bytes by kind; for phase rl in separate columns for rollout and update."""
    one = next(iter(footprints.values()))
    columns: dict[str, Mapping[str, int]] = {}
    for name, f in footprints.items():
        if f.rollout is None:
            columns[name] = f.kinds
        else:
            columns |= {f"{name}, rollout": f.rollout.kinds, f"{name}, update": f.kinds}
    shown = [kind for kind in KINDS if kind not in RL_KINDS or any(kinds.get(kind) for kinds in columns.values())]
    rows = [[kind, *(gb(kinds.get(kind, 0)) for kinds in columns.values()), _about(kind, one)] for kind in shown]
    rows.append(["total", *(gb(sum(kinds.values())) for kinds in columns.values()), ""])
    if any(f.host + f.staging for f in footprints.values()):
        host = [gb(f.host + f.staging) for f in footprints.values() for _ in range(1 + (f.rollout is not None))]
        rows.append(["in host memory", *host, ""])
    print()
    terminal.show_table(["memory", *columns, ""], rows, right=tuple(range(1, 1 + len(columns))))


def _describe_rollout(rollout: Any, cfg: Any, card: str | None) -> str:
    """Describe how many completions are generated at a time, and why."""
    token = f"{rollout.token / 1024:.4g} KiB of cache per token (rl.kv: {cfg.rl.kv})"
    if rollout.sequences == rollout.of:
        why = "all completions of a step"
    elif cfg.rl.slots is not None:
        why = f"rl.slots, of {rollout.of} of a step"
    elif cfg.rl.pages is not None:
        room = f" and {card} has room for" if card else ""
        why = f"as many of a step's {rollout.of} as {cfg.rl.pages} pages hold{room} (rl.pages)"
    else:
        why = f"as many of a step's {rollout.of} as {card} has room for; a run decides by what is free"
    return f"rollout: {rollout.sequences} completions at a time ({why}), {token}"


def _saved(size: int) -> str:
    """Format the saving of a switch; a switch may also use more memory."""
    return gb(size) if size >= 0 else f"costs {gb(-size)}"


def fits(card: Any, total: int, ranks: int) -> str:
    """Describe whether it fits, what is free or missing, and the reserve."""
    left = card.usable - total
    where = f"{card.name} per GPU" if ranks > 1 else card.name
    reserve = f"{gb(card.reserve)} reserved for the CUDA context, libraries and allocator fragmentation (assumed)"
    verdict = f"fits, {gb(left)} free" if left >= 0 else f"does not fit, {gb(-left)} too much"
    return f"{where}: {verdict}; {reserve}"


def show_fit(sizes: Any, message: str, args: Any, fixed: Sequence[str], names: Mapping[str, str]) -> int:
    """Print the proposal as YAML, its reasons, and faster settings that do not fit. Returns exit code 1 if nothing
    fits. ``names``: keys -> what they are called in the stage that is planned."""
    card = Card.parse(args.fit)
    with terminal.progress("searching", bytes=False) as progress:
        proposal = propose(sizes, card, args.ranks, fixed, progress)
    if args.json:
        terminal.show_json(
            {
                "tokens": message,
                "speeds": ASSUMED,
                "card": {"name": card.name, "bytes": card.size, "reserve": card.reserve},
                "tried": proposal.tried,
                "best": None if proposal.best is None else proposal.best.to_json(),
                "reasons": list(proposal.reasons),
                "exacter": [s.to_json() for s in proposal.more_exact],
                "faster": [{**s.to_json(), "over": s.excess(card)} for s in proposal.faster],
                "smallest": proposal.smallest.to_json(),
                "ranks": proposal.ranks,
            }
        )
        return 0 if proposal.best is not None else 1
    print(f"{message}; {ASSUMED}{'; the time of rollouts is not included' if sizes.cfg.train.phase == 'rl' else ''}")
    if proposal.best is None:
        small = proposal.smallest
        print(f"nothing fits: of {proposal.tried} settings, the smallest needs {gb(small.excess(card))} more:")
        print("\n".join(f"  {line}" for line in small.to_yaml(names=names)))
        print(
            f"it fits on {proposal.ranks} GPUs: --ranks {proposal.ranks}"
            if proposal.ranks
            else "a larger card, shorter rows (train.seq_length) or fewer images would help"
        )
        return 1
    best, now = proposal.best, configured_settings(sizes.cfg)
    print(fits(card, best.footprint.total, args.ranks))
    print(f"the fastest of {proposal.tried} settings that fit, by an estimate of FLOPs and bytes (not measured):")
    print()
    changes = best.to_yaml(now, names)
    print("\n".join(changes) if changes else "the configuration unchanged")
    print()
    if changes and args.file is not None:
        # Overrides of keys that the proposal changes are left out of the command.
        changed = {names.get(key, key) for key in best.differences(now)}
        remaining = [word for word in arguments.overrides(args) if word.partition("=")[0] not in changed]
        command = shlex.join(["octavo", "train", args.file, *remaining])
        print(f"on the command line: {command} {best.to_overrides(now, names)}")
    for reason in proposal.reasons:
        print(reason)
    if proposal.more_exact:
        print("also fits, with less rounding:")
    for s in proposal.more_exact:
        time, free = _percent(s.seconds / best.seconds - 1), gb(-s.excess(card))
        print(f"  {time} time, {free} free: with {s.to_overrides(best.settings, names)}")
    if proposal.faster:
        print("faster by the same estimate, but too large:")
    for s in proposal.faster:
        time, over = _percent(s.seconds / best.seconds - 1), gb(s.excess(card))
        print(f"  {time} time, {over} too much: with {s.to_overrides(best.settings, names)}")
    return 0


def _percent(change: float) -> str:
    return f"{100 * change:+.1f} %"


def _about(kind: str, footprint: Any) -> str:
    if kind == "activations":
        return ", ".join(f"{n / 1024:.1f} KiB per token of {name}" for name, n in footprint.per_token.items())
    if kind == "workspace":
        when = "" if footprint.rollout is None else "in the update: "
        return when + ", ".join(f"{name} {gb(n)}" for name, n in footprint.parts.items())
    return ""


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
