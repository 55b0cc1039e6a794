"""Kills replicas and trainers of runs with `rl.engine: ray` at random moments, and compares what the runs write.

    python -m benchmarks.fleet_kills [--kills 10] [--nodes 2] [--seed 0] [--dir build/fleet-kills] [--json FILE]

A quiet run comes first. Each further run has the same configuration; one of its processes gets SIGKILL at a random
moment: a replica, which Ray starts again, or the trainer with its cluster, which then resumes. `--nodes` further runs
use a cluster of three nodes, of which one with a replica is killed. The rows of metrics.jsonl without times, and
completions.jsonl, must be the bytes of the quiet run. Moments, kinds and seeds are recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from octavo.bench import record
from octavo.train.run_dir.run_dir import read_rows

TIMES = (
    "tokens_per_s",
    "rollout_tokens_per_s",
    "rollout_wait_s",
    "training_tokens_per_s",
    "seconds",
    "save_seconds",
    "time",
    "memory",
    "base",
)  # the last two are measured in the first step after a start
STEPS = 8
CONFIG = """
model: {{path: {home}/model}}
data: {{train: [{{path: {home}/digits/train_prompts.json}}], eval: []}}
train: {{phase: rl, steps: {steps}, warmup: 1, micro_batch: 16, seq_length: 96, lr: 1e-3}}
fp8: {{recipe: blockwise}}
rl:
  prompts: 8
  group: 8
  max_new_tokens: 48
  show: 64
  rewards: [{{reward: regex, pattern: '[0-9a-e]'}}]
  engine: {{name: ray, replicas: 2, chunk: 1}}
run: {{dir: {run}, save_every: 2}}
"""


def octavo(*words: str) -> list[str]:
    return [sys.executable, "-m", "octavo", *words]


def start(file: Path, *words: str, address: str = "") -> subprocess.Popen[bytes]:
    """Start a run as the leader of a group of processes, as a shell does. `address`: of a Ray cluster."""
    log = file.with_suffix(".log").open("ab")
    environment = {**os.environ, **({"RAY_ADDRESS": address} if address else {})}
    command = octavo("train", str(file), *words)
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)


def finish(process: subprocess.Popen[bytes], file: Path) -> None:
    if process.wait(600):
        raise SystemExit(f"the run failed: see {file.with_suffix('.log')}")


def processes(trainer: int) -> list[int]:
    """The processes of a trainer: itself, what it started, and what that started."""
    pids = {trainer}
    for _ in range(4):  # trainer, raylet, worker
        for entry in Path("/proc").iterdir():
            stat = _read(entry / "stat") if entry.name.isdigit() else ""
            if stat and int(stat.rpartition(")")[2].split()[1]) in pids:
                pids.add(int(entry.name))
    return sorted(pids)


def replicas(trainer: int) -> list[int]:
    """The processes of the replicas of a trainer, from the oldest."""
    return [pid for pid in processes(trainer) if _read(Path(f"/proc/{pid}/cmdline")).startswith("ray::RayActor")]


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def written(run: Path) -> tuple[str, str]:
    """What a run has written that must not depend on what was killed."""
    rows = [{key: value for key, value in row.items() if key not in TIMES} for row in read_rows(run / "metrics.jsonl")]
    return json.dumps(rows), (run / "completions.jsonl").read_text()


def kill_one(file: Path, run: Path, seed: int, seconds: float) -> dict[str, object]:
    """Start a run and kill one of its processes. `seconds`: how long the steps of the quiet run took."""
    draw = random.Random(seed)
    kind, share = draw.choice(("replica", "replica", "trainer")), draw.random()
    process = start(file)
    at = _wait(process, run, share * seconds)
    targets = replicas(process.pid)
    if process.poll() is not None or not targets:
        kind = "none: the run had ended"
    elif kind == "trainer":
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process = start(file, "run.resume=auto")
    else:
        os.kill(draw.choice(targets), signal.SIGKILL)
    finish(process, file)
    return {"seed": seed, "killed": kind, "after_step": at, "share": round(share, 3), **_events(run)}


def kill_node(file: Path, run: Path, seed: int, seconds: float) -> dict[str, object]:
    """Start a run on a cluster of three nodes, of which the first has no replica, and kill one of the others."""
    from ray.cluster_utils import Cluster

    share = random.Random(seed).random()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    process = start(file, address=cluster.address)
    at = _wait(process, run, share * seconds)
    cluster.remove_node(nodes[0], allow_graceful=False)
    finish(process, file)
    cluster.shutdown()
    return {"seed": seed, "killed": "node", "after_step": at, "share": round(share, 3), **_events(run)}


def _wait(process: subprocess.Popen[bytes], run: Path, seconds: float) -> int:
    """Wait until a run has sent its first weights, and then for `seconds`. Returns the number of its steps so far."""
    while not (run / "fleet.jsonl").is_file() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(seconds)
    return len(read_rows(run / "metrics.jsonl")) if (run / "metrics.jsonl").is_file() else 0


def _events(run: Path) -> dict[str, int]:
    """Return how many events a run had, and how many chunks it generated again."""
    events = [row for line in (run / "fleet.jsonl").read_text().splitlines() if "event" in (row := json.loads(line))]
    return {"events": len(events), "again": sum(row["chunk"] is not None for row in events)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("build/fleet-kills"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    home = args.dir.absolute()
    home.mkdir(parents=True, exist_ok=True)
    for command in (octavo("tiny", "qwen3_vl", str(home / "model")), octavo("digits", str(home / "digits"))):
        if not Path(command[-1]).exists():
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    names = ["quiet", *(f"seed{args.seed + n}" for n in range(args.kills + args.nodes))]
    results, expected, seconds = [], ("", ""), 0.0
    for number, name in enumerate(names):
        run, file = home / name, home / f"{name}.yaml"
        subprocess.run(["rm", "-rf", str(run)], check=True)
        file.write_text(CONFIG.format(home=home, run=run, steps=STEPS))
        if name == "quiet":
            finish(start(file), file)
            expected, rows = written(run), read_rows(run / "metrics.jsonl")
            seconds = sum(row["seconds"] for row in rows[1:])  # the first step waits for the replicas
            continue
        kill = kill_one if number <= args.kills else kill_node
        result = kill(file, run, args.seed + number - 1, seconds)
        result["equal"] = written(run) == expected
        results.append(result)
        print(json.dumps(result), flush=True)
    equal = sum(bool(result["equal"]) for result in results)
    print(f"{equal} of {len(results)} runs wrote the bytes of the quiet run")
    if args.json:
        record.save({"machine": record.describe_machine(), "steps": STEPS, "kills": results}, args.json)
    return 0 if equal == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
