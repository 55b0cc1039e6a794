"""The part of `octavo plan` about memory: the table by kind, what fits a card, what each switch buys, a setting that
fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.cli import terminal
from octavo.train.memory_plan import ASSUMED, KINDS, Card, Footprints, assumed, gb, propose, savings, settings_of


def predicted(cfg: Any, model: Any, family: Any, plan: Any, given: Any) -> tuple[Any, str]:
    """(what sizes configurations of this model, the sentence on the tokens that it assumes)."""
    if given is None:
        tokens, message = assumed(cfg, family.components, model.config)
    else:
        counts = ", ".join(f"{name} {n}" for name, n in given.counts.items())
        tokens, message = given, f"tokens of one micro-batch: {counts}"
    return Footprints(cfg, model, family, plan, tokens), message


def as_json(sizes: Any, message: str, args: Any) -> dict[str, Any]:
    """Everything that is printed, for programs."""
    out: dict[str, Any] = {"tokens": message, **sizes.of(sizes.cfg, 1).to_json()}
    if args.ranks > 1:
        out["per_rank"] = {**sizes.of(sizes.cfg, args.ranks).to_json(), "wire": sizes.wire(sizes.cfg, args.ranks)}
    card = Card.parse(args.card) if args.card else None
    if card is not None:
        over = sizes.of(sizes.cfg, args.ranks).total - card.usable
        out["card"] = {"name": card.name, "bytes": card.size, "reserve": card.reserve, "free": -over, "fits": over <= 0}
    out["switches"] = [switch.to_json() for switch in savings(sizes, args.ranks)]
    return out


def show(sizes: Any, message: str, args: Any) -> None:
    """The table, whether it fits, and what switches buy."""
    one = sizes.of(sizes.cfg, 1)
    columns, found = ["memory", "one GPU"], [one]
    if args.ranks > 1:
        found.append(sizes.of(sizes.cfg, args.ranks))
        columns.append(f"each of {args.ranks}")
    rows = [[kind, *(gb(f.kinds[kind]) for f in found), _about(kind, one)] for kind in KINDS]
    rows.append(["total", *(gb(f.total) for f in found), ""])
    if any(f.host for f in found):
        rows.append(["in host memory", *(gb(f.host) for f in found), ""])
    print()
    terminal.show_table([*columns, ""], rows, right=tuple(range(1, len(columns))))
    print()
    print(message)
    if args.ranks > 1:
        wire = {name: gb(size) for name, size in sizes.wire(sizes.cfg, args.ranks).items()}
        print(
            f"on the wire, to each of {args.ranks} ranks a micro-batch: {wire['weights']} of weights forward, "
            f"{wire['again']} backward, {wire['gradients']} of gradients (train.gather: {sizes.cfg.train.gather})"
        )
    if args.card:
        print(fits(Card.parse(args.card), found[-1].total, args.ranks))
    listed = list(savings(sizes, args.ranks))
    if listed:
        print()
        terminal.show_table(
            ("switch", "to", "saves", "what it costs"),
            [
                (s.key, f"{_word(s.value)} (on)" if s.on else _word(s.value), _saved(s.bytes), s.cost)
                for s in listed
                if s.bytes >= 1e6 or s.on
            ],
            right=(2,),
        )


def _saved(size: int) -> str:
    """What a switch saves; one that is on may take more than off would."""
    return gb(size) if size >= 0 else f"costs {gb(-size)}"


def fits(card: Any, total: int, ranks: int) -> str:
    """One sentence: what is there, what is kept free and why, what is left or lacking."""
    left = card.usable - total
    where = f"{card.name} a GPU" if ranks > 1 else card.name
    reserve = (
        f"{gb(card.reserve)} kept free for the CUDA context, libraries and what the allocator cannot use (assumed)"
    )
    verdict = f"fits, {gb(left)} free" if left >= 0 else f"does not fit, {gb(-left)} too much"
    return f"{where}: {verdict}; {reserve}"


def show_fit(sizes: Any, message: str, args: Any, held: Sequence[str]) -> int:
    """The proposal as YAML, its reasons and what is faster and does not fit. Exit code 1 where nothing fits."""
    card = Card.parse(args.fit)
    found = propose(sizes, card, args.ranks, held)
    if args.json:
        terminal.show_json(
            {
                "tokens": message,
                "speeds": ASSUMED,
                "card": {"name": card.name, "bytes": card.size, "reserve": card.reserve},
                "tried": found.tried,
                "best": None if found.best is None else found.best.to_json(),
                "reasons": list(found.reasons),
                "exacter": [s.to_json() for s in found.exacter],
                "faster": [{**s.to_json(), "over": s.over(card)} for s in found.faster],
                "smallest": found.smallest.to_json(),
                "ranks": found.ranks,
            }
        )
        return 0 if found.best is not None else 1
    print(f"{message}; {ASSUMED}")
    if found.best is None:
        small = found.smallest
        print(f"nothing fits: {found.tried} settings, and the smallest needs {gb(small.over(card))} more:")
        print("\n".join(f"  {line}" for line in small.yaml()))
        print(
            f"over {found.ranks} GPUs something fits: --ranks {found.ranks}"
            if found.ranks
            else "a larger card, shorter rows (train.seq_length) or fewer images would help"
        )
        return 1
    best, now = found.best, settings_of(sizes.cfg)
    print(fits(card, best.footprint.total, args.ranks))
    print(f"the fastest of {found.tried} settings that fits, by an estimate of FLOPs and bytes (not a measurement):")
    print()
    changes = best.yaml(now)
    print("\n".join(changes) if changes else "the configuration as it is")
    print()
    if changes and args.file is not None:
        print(f"on the command line: octavo train {args.file} {best.words(now)}")
    for reason in found.reasons:
        print(reason)
    if found.exacter:
        print("fits and rounds less:")
    for s in found.exacter:
        free = gb(-s.over(card))
        print(f"  {_percent(s.seconds / best.seconds - 1)} time, {free} free: with {s.words(best.settings)}")
    if found.faster:
        print("faster by the same estimate, and too large:")
    for s in found.faster:
        over = gb(s.over(card))
        print(f"  {_percent(s.seconds / best.seconds - 1)} time, {over} too much: with {s.words(best.settings)}")
    return 0


def _percent(change: float) -> str:
    return f"{100 * change:+.1f} %"


def _about(kind: str, footprint: Any) -> str:
    if kind == "activations":
        return ", ".join(f"{n / 1024:.1f} KiB a token of {name}" for name, n in footprint.per_token.items())
    if kind == "workspace":
        return ", ".join(f"{name} {gb(n)}" for name, n in footprint.parts.items())
    return ""


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
