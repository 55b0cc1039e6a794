"""The files of examples/launch: their words exist, and they start, restart and continue runs on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from octavo import checkpoint
from octavo.config import Config, to_yaml
from octavo.train.run_dir.run_dir import read_rows
from tests import ranks
from tests.rl.forks import both
from tests.train.conftest import make, place

__all__ = ["make", "place"]
ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "examples" / "launch"
SBATCH = LAUNCH / "slurm.sbatch"
TORCHRUN = LAUNCH / "torchrun_two_hosts.sh"
SKY = LAUNCH / "skypilot.yaml"

# As the manuals of sbatch and srun (Slurm 23) and of SkyPilot's tasks (0.9) have them.
OF_SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue", "open-mode",
    "output",
}  # fmt: skip
OF_SLURM = {
    "SLURM_JOB_NODELIST", "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
}  # fmt: skip
OF_SKY = {"name", "num_nodes", "resources", "workdir", "envs", "volumes", "setup", "run"}
OF_SKY_RESOURCES = {"accelerators", "use_spot", "disk_size", "job_recovery"}
OF_SKY_NODES = {"SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_TASK_ID"}

# Slurm's part: tasks with their numbers, of which one that fails ends the others.
SRUN = """#!/bin/bash
echo "srun $1" >>"$CALLS"
shift
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" &
    pids+=($!)
done
echo "${pids[@]}" >"$CALLS.pids"
code=0
while wait -n || { found=$?; [ $found -ne 127 ]; }; do
    if [ -n "${found:-}" ]; then
        [ $found -gt $code ] && code=$found
        kill "${pids[@]}" 2>/dev/null
        found=
    fi
done
exit $code
"""
SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && echo 127.0.0.1 && exit
echo "scontrol $*" >>"$CALLS"
"""


def _commands(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def test_scripts_are_shell_and_name_what_exists() -> None:
    for script in (SBATCH, TORCHRUN):
        assert os.access(script, os.X_OK) and script.read_text().startswith("#!/bin/bash\n")
        subprocess.run(["bash", "-n", script], check=True)
    asked = re.findall(r"^#SBATCH --([a-z-]+)", SBATCH.read_text(), re.M)
    assert set(asked) == OF_SBATCH
    assert set(re.findall(r"SLURM_\w+", _commands(SBATCH.read_text()))) <= OF_SLURM
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    asked = re.findall(r"^    (--[a-z-]+)", TORCHRUN.read_text(), re.M)
    assert len(asked) == 6 and set(asked) <= known
    task = YAML(typ="safe").load(SKY.read_text())
    assert task.keys() == OF_SKY and task["resources"].keys() == OF_SKY_RESOURCES
    assert set(re.findall(r"SKYPILOT_\w+", task["run"])) <= OF_SKY_NODES
    assert (ROOT / re.search(r"bash (\S+)", task["run"])[1]) == TORCHRUN  # type: ignore[index]
    set_there = set(re.findall(r"(\w+)=", task["run"]))
    assert set_there <= set(re.findall(r"\$\{(\w+):", TORCHRUN.read_text())), "variables that the script reads"


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """An environment whose srun, scontrol, torchrun and octavo are ours; `calls` gets what was asked of Slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    own = {
        "srun": SRUN, "scontrol": SCONTROL,
        "torchrun": f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n',
        "octavo": f'#!/bin/bash\nexec {sys.executable} -m octavo "$@"\n',
    }  # fmt: skip
    for name, text in own.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": str(ranks.free_port()), "SLURM_NTASKS": "2"}
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "CALLS": str(tmp_path / "calls")}
    return {**os.environ, **slurm, **path, "CUDA_VISIBLE_DEVICES": "", "RETRIES": "2"}


@pytest.mark.parametrize(
    ("codes", "code", "asked"),
    [
        (["1", "137", "0"], 0, 3 * ["srun --kill-on-bad-exit=1"]),
        (["1", "1", "1"], 1, 3 * ["srun --kill-on-bad-exit=1"]),
        (["143"], 143, ["srun --kill-on-bad-exit=1", "scontrol requeue {job}"]),
        (["2"], 2, ["srun --kill-on-bad-exit=1"]),
    ],
)
def test_the_slurm_job_ends_restarts_or_is_queued_again(commands, tmp_path, codes, code, asked) -> None:
    """Octavo's part is played: rank 0 ends with the next code, rank 1 waits for its signal."""
    (tmp_path / "codes").write_text(" ".join(codes))
    (tmp_path / "bin" / "octavo").write_text(f"""#!/bin/bash
echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR:$MASTER_PORT $*" >>{tmp_path}/seen
[ "$RANK" = 1 ] && {{ trap 'exit 0' TERM; sleep 20 >/dev/null 2>&1 & wait; exit 0; }}
sleep 0.2
read -r next rest <{tmp_path}/codes
echo "$rest" >{tmp_path}/codes
exit "$next"
""")
    done = subprocess.run([SBATCH, "run.yaml", "a=b c"], env=commands, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    job = commands["SLURM_JOB_ID"]
    assert (tmp_path / "calls").read_text().splitlines() == [line.format(job=job) for line in asked]
    port = 20000 + int(job) % 20000
    seen = set((tmp_path / "seen").read_text().splitlines())
    assert seen == {f"{n} 2 {n} 127.0.0.1:{port} train run.yaml a=b c run.resume=auto" for n in (0, 1)}


def _rows(cfg: Config) -> list[dict]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")


def _saved(cfg: Config) -> list[int]:
    return checkpoint.steps(Path(cfg.run.dir) / "checkpoints")


def _continued(log: Path) -> list[int]:
    """The steps after which the run of a log went on."""
    return [int(step) for step in re.findall(r"continuing after step (\d+)", log.read_text())]


def _wait(until: Callable[[], bool], of: subprocess.Popen) -> None:
    patience = time.monotonic() + 240
    while not until() and time.monotonic() < patience and of.poll() is None:
        time.sleep(0.05)


def _file(cfg: Config) -> str:
    file = Path(cfg.run.dir).parent / "run.yaml"
    file.write_text(to_yaml(cfg))
    return str(file)


LONG = ("train.steps=40", "train.micro_batch=1", "train.global_batch=2", "data.eval=[]", "run.save_every=5",
        "run.timeout=60", "run.save=async")  # fmt: skip


@pytest.mark.long
def test_slurms_sigterm_saves_and_queues_the_job_again(commands, make, tmp_path) -> None:
    cfg = make(*LONG, "train.steps=5000", "train.warmup=0")
    job = subprocess.Popen([SBATCH, _file(cfg)], env=commands)
    _wait(lambda: len(_rows(cfg)) >= 7, job)
    for pid in (tmp_path / "calls.pids").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    assert job.wait(60) == 143
    assert "scontrol requeue" in (tmp_path / "calls").read_text()
    assert _saved(cfg)[-1] == _rows(cfg)[-1]["step"] < 5000


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for torchrun's processes")
def test_torchrun_starts_a_run_again_and_goes_on_with_fewer_nodes(commands, make, tmp_path) -> None:
    """Two agents as on two hosts. A rank is killed: both are started again, and losses are those of an undisturbed run
    to the bit. Then a whole host is lost: the other one goes on alone."""
    cfg = make(*LONG)
    env = {**commands, "HEAD": f"127.0.0.1:{ranks.free_port()}", "NODES": "1:2", "PROCESSES": "1"}
    env |= {
        "PET_RDZV_CONF": "last_call_timeout=2",
        "PET_LOCAL_ADDR": "127.0.0.1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30",
    }
    hosts = []
    try:
        for name in ("first", "second"):
            log = (tmp_path / name).open("w")
            hosts.append(subprocess.Popen([TORCHRUN, _file(cfg)], env=env, stdout=log, stderr=subprocess.STDOUT))
            time.sleep(1)
        head, lost = hosts
        _wait(lambda: bool(_saved(cfg)), head)  # not a number of steps: saves are asynchronous
        (rank,) = _children(lost.pid)
        os.kill(rank, signal.SIGKILL)
        _wait(lambda: any(_saved(cfg)[-1] > step for step in _continued(tmp_path / "first")), head)
        for pid in (lost.pid, *_children(lost.pid)):
            os.kill(pid, signal.SIGKILL)
        assert head.wait(240) == 0, (tmp_path / "first").read_text()
    finally:
        for host in hosts:
            host.kill()
    _, alone = _continued(tmp_path / "first")
    assert "saved by 2 rank(s) of 1 thread(s), continued on 1 of 1" in (tmp_path / "first").read_text()
    whole = make(*LONG, dir="whole")
    assert [code for code, _ in both(whole)] == [0, 0]
    losses, expected = ([row["loss"] for row in _rows(run)] for run in (cfg, whole))
    assert len(losses) == 40 and losses[:alone] == expected[:alone]
    assert losses[alone:] == pytest.approx(expected[alone:], rel=1e-2)
