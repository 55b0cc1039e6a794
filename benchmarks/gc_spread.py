"""Measures the effect of Python's garbage collector on step times, for each setting of `train.gc`.

    python benchmarks/gc_spread.py [--rounds 8] [--steps 150] [--out FILE.json]

Each round trains a mini Qwen3-VL once per setting, starting with a different one each time, so that the load of the
machine affects all of them. The first 10 steps of each run are dropped. A step lasts until the next one begins, so that
work between steps counts, in CPU seconds of the process (one thread); on a shared machine, wall-clock time would show
the load instead. `p50`, `p99` and `max` are over all steps of a setting; `spread` is p99 over p50, with a 95 % interval
by bootstrap over runs, and `against_default` is the ratio of two spreads of the same rounds. `gc.callbacks` report the
collections of each generation per 1,000 steps, the longest collection, and the share of time in collections. `objects`
is the number of tracked objects at the end.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo import train
from octavo.bench import record
from octavo.config import load_config_text
from octavo.data.builtin import digits
from octavo.models.tiny import tiny

SETTINGS = {"default": "null", "700,10,1000": "700,10,1000", "freeze": "freeze", "50": "50"}
WARM, DRAWS = 10, 2000


class Times(train.Callback):
    """When steps begin, and the collections after the warm-up: (generation, seconds)."""

    def begin(self, run: train.Run) -> None:
        self.begins: list[float] = []
        self.collections: list[tuple[int, float]] = []
        self.objects, self._since = 0, 0.0
        gc.callbacks.append(self.collect)

    def collect(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._since = time.process_time()
        elif len(self.begins) > WARM:
            self.collections.append((info["generation"], time.process_time() - self._since))

    def before_step(self, run: train.Run, number: int, batches: Any) -> None:
        self.begins.append(time.process_time())
        if number == run.cfg.train.steps:
            gc.callbacks.remove(self.collect)
            self.objects = len(gc.get_objects()) + gc.get_freeze_count()


def run(folder: Path, name: str, setting: str, steps: int) -> Times:
    text = f"""
model: {{path: {folder / "tiny"}}}
fp8: {{recipe: blockwise}}
data: {{train: [{{path: {folder / "digits/train.json"}}}]}}
train: {{steps: {steps}, seq_length: 128, micro_batch: 2, global_batch: 2, lr: 1e-3}}
run: {{dir: {folder / name}, health_every: 0, tensorboard: false, hf: false, save_every: 0, threads: 1}}
"""
    gc.collect()  # what the run before has left
    times = Times()
    train.run(load_config_text(text, [f"train.gc={setting}"]), callbacks=[times])
    return times


def spread(runs: list[np.ndarray]) -> float:
    low, high = np.quantile(np.concatenate(runs), [0.5, 0.99])
    return float(high / low)


def figures(runs: list[Times], plain: list[Times], seed: int) -> dict[str, Any]:
    """Figures of one setting, compared with the default in the same rounds."""
    mine, theirs = ([np.diff(one.begins[WARM:]) for one in of] for of in (runs, plain))
    whole = np.concatenate(mine)
    draw = np.random.default_rng(seed)
    picked = [draw.integers(0, len(mine), len(mine)) for _ in range(DRAWS)]
    spreads = [spread([mine[n] for n in one]) for one in picked]
    against = [spread([mine[n] for n in one]) / spread([theirs[n] for n in one]) for one in picked]
    steps, every = len(whole), [entry for one in runs for entry in one.collections]
    return {
        "steps": steps,
        **{f"{word}_ms": 1e3 * float(value) for word, value in
           zip(("p50", "p99", "max"), np.quantile(whole, [0.5, 0.99, 1.0]), strict=True)},
        "spread": spread(mine), "spread_interval": np.quantile(spreads, [0.025, 0.975]).tolist(),
        "against_default": spread(mine) / spread(theirs),
        "against_default_interval": np.quantile(against, [0.025, 0.975]).tolist(),
        "collections_in_1000_steps": [1e3 * sum(of == n for of, _ in every) / steps for n in range(3)],
        "longest_ms": [1e3 * max((s for of, s in every if of == n), default=math.nan) for n in range(3)],
        "share_of_time": sum(seconds for _, seconds in every) / float(whole.sum()),
        "objects": int(np.median([one.objects for one in runs])),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gc.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = list(SETTINGS)
    times: dict[str, list[Times]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny.write("qwen3_vl", folder / "tiny", size="mini")
        digits.write(folder / "digits", train=48, test=8)
        run(folder, "warm", "null", WARM + 2)
        for number in range(args.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(run(folder, f"{names.index(name)}_{number}", SETTINGS[name], args.steps))
            print(f"round {number + 1} of {args.rounds}", flush=True)
    rows = {name: figures(times[name], times["default"], seed) for seed, name in enumerate(names)}
    for name, row in rows.items():
        low, high = row["against_default_interval"]
        print(f"{name:12} p50 {row['p50_ms']:.1f} ms  p99 {row['p99_ms']:.1f}  max {row['max_ms']:.1f}  spread "
              f"{row['spread']:.2f}, {row['against_default']:.2f} of the default's ({low:.2f} to {high:.2f})  "
              f"collections {row['share_of_time']:.1%}")  # fmt: skip
    about = {"command": f"python benchmarks/gc_spread.py --rounds {args.rounds} --steps {args.steps}"}
    record.save(
        {**about, "machine": record.describe_machine(), "thresholds": list(gc.get_threshold()), "settings": rows},
        args.out,
    )


if __name__ == "__main__":
    main()
