"""Describes a cluster: data-sheet speeds and memory of a GPU, and the fractions of those speeds that are reached.

`h100x8x8` names a GPU, the number of GPUs in a node and the number of nodes. Any other cluster is a YAML file:

```yaml
gpu: my-card          # a label
bf16: 989e12          # dense FLOP/s
fp8: 1979e12
memory: 80GB
hbm: 3.35e12          # bytes/s of the card's memory
per_node: 8
nodes: 8
nvlink: 450e9         # bytes/s of a GPU to other GPUs in its node, one way
network: 50e9         # bytes/s of a GPU to other nodes, one way
speeds: {bf16: 0.5}   # optional: measured fractions; see Speeds
```
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from octavo.base.safe_read import read_json, read_text
from octavo.base.wording import nearest
from octavo.config.yaml.document import read_text as parse
from octavo.train.errors import TrainError
from octavo.train.estimate.memory import Card

EXAMPLE_HINT = "docs/scale.md shows a whole file"
FRACTIONS = ("bf16", "fp8", "experts", "attention", "links")  # the speeds that are fractions, at most 1
SPEEDS_FILE = Path(__file__).with_name("speeds.json")


@dataclass(frozen=True)
class Speeds:
    """The fractions of the data-sheet speeds that are reached, and the memory passes of a block.

    ``bf16``, ``fp8`` and ``attention`` are fractions of peak FLOP/s in matrix products; ``experts`` is a further factor
    on the first two for experts, which have few rows. ``compiled`` and ``eager`` are the passes over memory that a
    block makes for each value of its hidden states, forward and backward together. ``links`` is the fraction of link
    bandwidth, which is assumed. All others are fitted to published figures by `python benchmarks/cost.py`.
    """

    bf16: float
    fp8: float
    experts: float
    attention: float
    compiled: float
    eager: float
    links: float


@dataclass(frozen=True)
class Cluster:
    """A cluster: ``bf16`` and ``fp8`` in dense FLOP/s, ``hbm``, ``nvlink`` and ``network`` in bytes/s."""

    gpu: str
    bf16: float
    fp8: float
    memory: Card
    hbm: float
    nvlink: float
    network: float
    per_node: int
    nodes: int
    speeds: Speeds

    @property
    def ranks(self) -> int:
        return self.per_node * self.nodes

    def with_ranks(self, ranks: int) -> Cluster:
        """Return the same cluster with this many GPUs."""
        per_node = min(self.per_node, ranks)
        return replace(self, per_node=per_node, nodes=-(-ranks // per_node))

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Parse ``h100x8x8`` or read a YAML file; raises TrainError for anything else."""
        if (match := re.fullmatch(r"([a-z0-9]+?)x(\d{1,4})x(\d{1,5})", text.lower())) and match[1] in GPUS:
            return cls(match[1], *GPUS[match[1]], int(match[2]), int(match[3]), load_speeds())._validate(text)
        if not text.endswith((".yaml", ".yml")):
            suggestion = nearest(text.lower().split("x")[0], GPUS)
            hint = f" (did you mean {suggestion}x8x8?)" if suggestion and not match else ""
            raise TrainError(
                f"cannot parse --cluster {text[:60]!r}{hint}: give the GPU, the number per node and the number of "
                f"nodes, as in h100x8x8, or a YAML file of bandwidths. GPUs: {', '.join(GPUS)}"
            )
        return _read_cluster(text)

    def _validate(self, source: str) -> Cluster:
        not_positive = [
            f.name for f in fields(self) if isinstance(v := getattr(self, f.name), int | float) and not v > 0
        ]
        not_positive += [f"speeds.{f.name}" for f in fields(Speeds) if not getattr(self.speeds, f.name) > 0]
        if not_positive:
            raise TrainError(f"{source}: {', '.join(not_positive)} must be above 0")
        if too_large := [f"speeds.{name}" for name in FRACTIONS if getattr(self.speeds, name) > 1]:
            raise TrainError(
                f"{source}: {', '.join(too_large)} must be at most 1, as fractions of the data-sheet speed"
            )
        return self


# NVIDIA's data sheets: dense FLOP/s in BF16 and FP8 (without sparsity), the card, bytes/s of its memory, NVLink bytes/s
# one way; network: one 400 Gb/s adapter per GPU (200 Gb/s in A100 nodes). An A100 has no FP8, so its GEMMs run in BF16.
GPUS: dict[str, tuple[float, float, Card, float, float, float]] = {
    "a100": (312e12, 312e12, Card.parse("a100"), 2.04e12, 300e9, 25e9),
    "h100": (989e12, 1979e12, Card.parse("h100"), 3.35e12, 450e9, 50e9),
    "h800": (989e12, 1979e12, Card.parse("h800"), 3.35e12, 200e9, 50e9),
    "h200": (989e12, 1979e12, Card.parse("h200"), 4.8e12, 450e9, 50e9),
    "b200": (2250e12, 4500e12, Card.parse("b200"), 7.7e12, 900e9, 50e9),
}


@cache
def load_speeds() -> Speeds:
    """Return the constants that `benchmarks/cost.py` fitted to published figures."""
    constants = read_json(SPEEDS_FILE)
    return Speeds(**{f.name: float(constants["speeds"][f.name]) for f in fields(Speeds)})


def _read_cluster(path: str) -> Cluster:
    """Read a cluster from a YAML file; raises a TrainError that names every missing, unknown or non-numeric value."""
    parsed = parse(read_text(path, TrainError), path, fix=EXAMPLE_HINT)
    if parsed.problems:
        raise TrainError("\n".join(map(str, parsed.problems)))
    values: dict[str, Any] = dict(parsed.value)
    names = {f.name for f in fields(Cluster)}
    speeds = values.pop("speeds", None) or {}
    if missing := sorted(names - values.keys() - {"speeds"}):
        raise TrainError(f"{path}: {', '.join(missing)} missing; {EXAMPLE_HINT}")
    known = {f.name for f in fields(Speeds)}
    if not isinstance(speeds, dict):
        raise TrainError(f"{path}: speeds must be a mapping of {', '.join(sorted(known))}")
    if unknown := sorted({*(values.keys() - names), *(f"speeds.{name}" for name in set(speeds) - known)}):
        raise TrainError(f"{path}: unknown keys: {', '.join(unknown)}; a cluster has {', '.join(sorted(names))}")
    gpu, memory = values.pop("gpu"), values.pop("memory")
    if not isinstance(gpu, str):
        raise TrainError(f"{path}: gpu must be a name, found {gpu!r}")
    try:
        card = Card.parse(str(memory))
    except TrainError as error:
        raise TrainError(f"{path}: memory: {error}") from error
    # all other values are numbers
    numbers = {**values, **{f"speeds.{name}": value for name, value in speeds.items()}}
    bad = [name for name, value in numbers.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    bad += [name for name in ("per_node", "nodes") if name not in bad and not isinstance(values[name], int)]
    if bad:
        raise TrainError(f"{path}: {', '.join(bad)} must be a number (per_node and nodes: an integer)")
    return Cluster(gpu=gpu, memory=card, **values, speeds=replace(load_speeds(), **speeds))._validate(path)
