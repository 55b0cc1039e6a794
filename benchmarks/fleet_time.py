"""Times steps of `examples/digits_rl.yaml` with the engine in the trainer's process and with replicas in Ray.

    python -m benchmarks.fleet_time [--steps 20] [--rounds 2] [--tokens 2 32] [--dir build/fleet-time] [--json FILE]

All processes share the cores of this machine, so replicas have nothing to gain but what the trainer leaves idle. The
variants take turns, and every figure is a ratio within one round: the median step of a variant over the median step of
`octavo` with one thread. The first two steps, in which replicas start, are left out. Completions have up to `--tokens`
new tokens; equal groups are not replaced, because replicas cannot generate during the update then.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from octavo.bench import record
from octavo.train.run_dir.run_dir import read_rows

ROOT = Path(__file__).resolve().parents[1]
RAY = ("rl.engine.name=ray", "rl.engine.replicas=2", "rl.engine.chunk=8")
VARIANTS: dict[str, tuple[str, ...]] = {
    "octavo": (),
    "octavo, two threads": ("run.threads=2",),
    "ray, two replicas": RAY,
    "octavo, rl.stale": ("rl.stale=1",),
    "ray, two replicas, rl.stale": (*RAY, "rl.stale=1"),
}
LEFT_OUT = 2


def octavo(*words: str) -> None:
    """Run a command of octavo; its output is shown if it fails."""
    done = subprocess.run([sys.executable, "-m", "octavo", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"octavo {' '.join(words)}\n{done.stdout}{done.stderr}")


def prepare(home: Path) -> tuple[str, ...]:
    """Write the model that reads half of the digits, and the data. Returns the settings that name them."""
    home.mkdir(parents=True, exist_ok=True)
    model, digits, base = home / "tiny", home / "digits", home / "base"
    if not model.exists():
        octavo("tiny", "qwen3_vl", str(model))
    if not digits.exists():
        octavo("digits", str(digits))
    if not (base / "hf").exists():
        settings = (f"model.path={model}", f"data.train=[{{path: {digits}/train.json}}]", "data.eval=[]")
        octavo("train", str(ROOT / "examples/digits_rl_base.yaml"), *settings, f"run.dir={base}", "run.resume=auto")
    return f"model.path={base}/hf", f"data.train=[{{path: {digits}/train_prompts.json}}]", "data.eval=[]"


def time_steps(home: Path, settings: tuple[str, ...], tokens: int, steps: int, variant: str) -> dict[str, float]:
    """Train, and return the median seconds of a step, and of the wait for replicas in it."""
    run = home / "run"
    subprocess.run(["rm", "-rf", str(run)], check=True)
    octavo(
        "train",
        str(ROOT / "examples/digits_rl.yaml"),
        *settings,
        *VARIANTS[variant],
        f"rl.max_new_tokens={tokens}",
        f"train.steps={steps}",
        "train.seq_length=128",
        "rl.dynamic_sampling=false",
        "run.health_every=0",
        "run.eval_every=0",
        f"run.dir={run}",
    )
    rows = read_rows(run / "metrics.jsonl")[LEFT_OUT:]
    wait = [row["rollout_wait_s"] for row in rows if "rollout_wait_s" in row]
    seconds = statistics.median(row["seconds"] for row in rows)
    return {"seconds": seconds, **({"wait": statistics.median(wait)} if wait else {})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--dir", type=Path, default=Path("build/fleet-time"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    home = args.dir.absolute()
    settings, rows = prepare(home), []
    for tokens in args.tokens:
        for number in range(args.rounds):
            for variant in VARIANTS:
                row = {"tokens": tokens, "round": number, "variant": variant}
                rows.append({**row, **time_steps(home, settings, tokens, args.steps, variant)})
                first = next(r for r in rows if (r["tokens"], r["round"]) == (tokens, number))
                rows[-1]["ratio"] = rows[-1]["seconds"] / first["seconds"]
                print(f"{tokens} tokens, {variant}: {rows[-1]['seconds']:.3f} s, {rows[-1]['ratio']:.2f}", flush=True)
    if args.json:
        record.save({"machine": record.describe_machine(), "steps": args.steps, "rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
