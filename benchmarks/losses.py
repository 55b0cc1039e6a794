"""Checks that losses are unchanged to the last bit, as they must be after a change that does not concern numerics.

    python benchmarks/losses.py --check                      # train again and compare; exit code 1 if a bit differs
    python benchmarks/losses.py --check --only qwen3_text    # only one run; --only can be repeated
    python benchmarks/losses.py --only qwen3_text            # train and write this run to the file

The file has the version of Octavo that wrote each run. Runs of 0.4.0 are written again where a change concerns their
numerics, and only then. Projectors run as in 0.4.0: in high precision, unless the configuration of a run names them.

The runs are every file of examples/tiny, as the comment at its top describes (20 steps), and the first 50 of the 500
steps of the demo, in high precision and in FP8. They only use the command line, one thread and no GPU, so the script
works with any version. Bits also depend on the kernels of the CPU: on a platform different from the file's, nothing is
compared (exit code 2). A different version of transformers is only reported, because its models compute the same until
one of them is changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "results" / "losses.json"
TINY = {path.stem: path for path in sorted((ROOT / "examples" / "tiny").glob("*.yaml"))}
DEMO = {"demo_fp32": "off", "demo_fp8": "blockwise"}  # name -> fp8.recipe
# Runs that do not set the projector's recipe, and what 0.4.0 chose for it.
UNNAMED = {"demo_fp8", "internvl", "lora_qwen3_vl", "lora_qwen3_vl_moe", "memory", "qwen3_vl_moe"}
STAYS = "fp8.image_projector.recipe=off"
# 0.4.0 estimated memory with random inputs from the generator that dropout then drew its masks from: these cannot be
# drawn again. Without dropout the run computes the same.
WITHOUT_DROPOUT = {"lora_qwen3_vl": "lora.dropout=0"}
# The demo of 0.4.0 had none of the savings that it has now.
DEMO_AS_BEFORE = ("fp8.activations=bf16", "optimizer.states=fp32", "optimizer.master=fp32")
DEMO_STEPS = 50  # of the 500 that the learning rate is scheduled over
PREPARE = (
    "from pathlib import Path; from octavo.report.demo.handwriting import write_inputs; "
    "write_inputs(Path('demo'), 500, None)"
)
OCTAVO = [sys.executable, "-m", "octavo"]
EQUAL, DIFFERS, OTHER_PLATFORM = 0, 1, 2


def platform() -> dict[str, str]:
    """What the bits of a loss depend on apart from Octavo: versions, the CPU's vector units, and what its kernels
    return."""
    import torch
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": _kernels(),
    }


def _kernels() -> str:
    """A fingerprint of a few sums, products and functions: equal vector units can still be served by other kernels."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source = torch.Generator().manual_seed(0)
        a, b = (torch.randn(96, 320, generator=source) for _ in range(2))
        half = torch.nn.functional.linear(a.bfloat16(), b.bfloat16())
        results = [a @ b.T, half.float(), a.softmax(-1), a.exp(), a.sum(0), a.square().mean().rsqrt(), a.sin()]
    finally:
        torch.set_num_threads(threads)
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def losses_of(name: str, folder: Path) -> list[str]:
    """Train the run `name` in `folder`, which the runs share, and give its losses as exact hexadecimal floats."""
    if name in DEMO:
        if not (folder / "demo").exists():
            _call([sys.executable, "-c", PREPARE], folder)
        words = [f"fp8.recipe={DEMO[name]}", *DEMO_AS_BEFORE, "run.hf=false"]
        return _train(["demo/demo.yaml", *words], name, folder, DEMO_STEPS)
    copy = folder / "examples" / "tiny" / f"{name}.yaml"
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = TINY[name].read_text(encoding="utf-8")
    copy.write_text(text, encoding="utf-8")
    for words in [line.split()[2:] for line in text.split("\n") if line.startswith("#   octavo ")]:
        if words[0] != "train":
            _call([*OCTAVO, *words], folder)
    return _train([str(copy)], name, folder)


def _train(words: Sequence[str], name: str, folder: Path, steps: int | None = None) -> list[str]:
    """`octavo train WORDS`: the losses of the whole run, or of its first `steps`, after which it is stopped."""
    words = [*words, *([STAYS] if name in UNNAMED else [])]
    words += [WITHOUT_DROPOUT[name]] if name in WITHOUT_DROPOUT else []
    command = [*OCTAVO, "train", *words, f"run.dir=runs/{name}", "run.threads=1"]
    metrics = folder / "runs" / name / "metrics.jsonl"
    if steps is None:
        _call(command, folder)
    else:
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=folder, env=_environment(), stdout=log, stderr=log)
            try:
                while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < steps):
                    time.sleep(0.2)
            finally:
                process.kill()
                process.wait()
        if not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
            raise SystemExit(f"{name} ended before step {steps}:\n{(folder / 'log').read_text()[-2000:]}")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").split("\n")[:steps] if line]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), name
    return ["nan" if row["loss"] is None else float(row["loss"]).hex() for row in rows]


def _call(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")


def _environment() -> dict[str, str]:
    """This copy of Octavo, one thread, no GPU."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def compared(old: Sequence[str], new: Sequence[str]) -> str:
    """ "equal, bit for bit", or where they first differ."""
    for step, (was, now) in enumerate(zip(old, new, strict=False), 1):
        if was != now:
            return f"differs from step {step} on: was {float.fromhex(was)!r}, is {float.fromhex(now)!r}"
    return "equal, bit for bit" if len(old) == len(new) else f"had {len(old)} steps, has {len(new)}"


def version() -> str:
    """The version of the Octavo that this script belongs to."""
    sys.path.insert(0, str(ROOT))
    import octavo

    return octavo.__version__


def check(recorded: dict[str, Any], names: Sequence[str], folder: Path) -> int:
    """Train again and print for each run whether its losses equal the file's."""
    here = platform()
    installed = here.pop("transformers")
    if here != recorded["platform"]:
        print("nothing is judged: the losses were made on another platform, where other bits are right.")
        for key in {**recorded["platform"], **here}:
            print(f"  {key}: {recorded['platform'].get(key)} there, {here.get(key)} here")
        return OTHER_PLATFORM
    code = EQUAL
    for name in names:
        run = recorded["runs"].get(name)
        word = "not in the file" if run is None else compared(run["losses"], losses_of(name, folder))
        if run is not None and not word.startswith("equal") and run["transformers"] != installed:
            word += f"; made with transformers {run['transformers']}, and {installed} is installed"
        code = code if word.startswith("equal") else DIFFERS
        print(f"{name}: {word}", flush=True)
    return code


def record(file: Path, names: Sequence[str], folder: Path) -> int:
    """Write the losses; runs that are not asked for stay in a file that is of this platform."""
    here = platform()
    maker = {"version": version(), "transformers": here.pop("transformers")}
    recorded = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"platform": here, "runs": {}}
    if recorded["platform"] != here:
        raise SystemExit(f"{file} was made on {recorded['platform']}, and this is {here}; name another --file")
    for name in names:
        losses = losses_of(name, folder)
        recorded["runs"][name] = {**maker, "losses": losses}
        runs = dict(sorted(recorded["runs"].items()))
        file.write_text(json.dumps({**recorded, "runs": runs}, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {len(losses)} steps, the last loss {float.fromhex(losses[-1])!r}", flush=True)
    return EQUAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    parser.add_argument("--only", metavar="NAME", action="append", choices=[*TINY, *DEMO], help="only this run")
    parser.add_argument("--file", type=Path, default=FILE, help="where the losses are kept")
    args = parser.parse_args()
    names = args.only or [*TINY, *DEMO]
    with tempfile.TemporaryDirectory(prefix="octavo-losses-") as folder:
        if args.check:
            recorded = json.loads(args.file.read_text(encoding="utf-8"))
            return check(recorded, args.only or [*recorded["runs"]], Path(folder))
        return record(args.file, names, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
