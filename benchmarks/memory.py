"""Measures the resident memory of a full-parameter step of a 0.5 B model: torch's AdamW in fp32 and Octavo's settings.

    python benchmarks/memory.py                     every run, one process each, one after the other
    python benchmarks/memory.py tokens=1024 steps=4

The model has the sizes of Qwen2.5-0.5B (24 layers, hidden size 896, 14 heads of 64, MLP size 4,864, 151,936 words,
tied) and random weights. All runs have the same weights and the same batch, one random sequence that every step
repeats. Measured are the peak resident memory of the process (VmHWM of /proc/self/status) from building the model to
the last update, and what it consisted of: counted tensors, and the rest.

Writes results/memory_cpu.json and .png. Exit code 1 if a loss is not finite or does not fall, or if `bf16+sr` or update
in backward saves less than a factor of 2.2 compared with the baseline. Linux only; the baseline needs about 12 GB.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
KINDS = ("weights", "master", "gradients", "optimizer", "codes", "activations", "logits", "libraries", "other")

# name -> how it is trained. The baseline is what one writes without Octavo, in its leanest form: fused AdamW makes no
# temporary copies. `check`: the ratio must reach NEEDED.
BASELINE = "torch AdamW, fp32"
FP8 = {"recipe": "blockwise", "activations": "fp8", "weight_codes": "recast"}
RUNS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "Octavo, bf16+16": {"fp8": FP8, "master": "bf16+16"},
    "Octavo, bf16+sr": {"fp8": FP8, "master": "bf16+sr", "check": True},
    "Octavo, update in backward": {"fp8": FP8, "master": "bf16+sr", "in_backward": True, "check": True},
}
NEEDED = 2.2
SETTINGS = {"tokens": 256, "steps": 2}
# Freed memory goes back to the system at once instead of waiting in glibc's heap: the same in all runs.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "393216", "MALLOC_TRIM_THRESHOLD_": "393216"}


def main(arguments: list[str]) -> int:
    changes = dict(argument.partition("=")[::2] for argument in arguments)
    if not all(key in SETTINGS and value.isdigit() and int(value) > 1 for key, value in changes.items()):
        print(f"memory.py takes {' '.join(f'{key}=N' for key in SETTINGS)}, N from 2 on; found {' '.join(arguments)}")
        return 2
    settings = {**SETTINGS, **{key: int(value) for key, value in changes.items()}}
    runs = []
    for name in RUNS:
        print(f"{time.strftime('%X')} {name}", flush=True)
        runs.append(_in_own_process(name, settings))
    for line in table(runs):
        print(line)
    keep(runs, settings)
    return int(not all(passes(run, runs[0]) for run in runs))


def passes(run: dict[str, Any], baseline: dict[str, Any]) -> bool:
    """Whether its losses are finite and fall, and the memory does where it must."""
    losses = run["losses"]
    falls = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    enough = not RUNS[run["name"]].get("check") or baseline["peak"] / run["peak"] >= NEEDED
    return falls and enough


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Megabytes by kind at the moment of the peak, the peak, and how many times less than the baseline's it is."""
    head = f"{'MB at the peak':<29}" + "".join(f"{kind:>12}" for kind in KINDS) + f"{'peak':>9}{'less':>8}  at"
    lines = [head]
    for run in runs:
        cells = "".join(f"{run['kinds'][kind] / 1e6:>12,.0f}" for kind in KINDS)
        ratio = f"{runs[0]['peak'] / run['peak']:.2f}x"
        lines.append(f"{run['name']:<29}{cells}{run['peak'] / 1e6:>9,.0f}{ratio:>8}  {run['phase']}")
    for run in runs:
        losses = " ".join(f"{x:.4f}" for x in run["losses"])
        lines.append(f"{run['name']:<29}losses {losses}, {run['seconds']:.1f} s a step, params {run['params']:,}")
    return lines


def _in_own_process(name: str, settings: dict[str, int]) -> dict[str, Any]:
    """One run in a process of its own, so that nothing of another is left in its memory."""
    command = [sys.executable, str(Path(__file__).resolve()), "--run", name, json.dumps(settings)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line
            if not line.startswith("{"):
                print(f"{time.strftime('%X')}   {line}", end="", flush=True)
    if process.returncode:
        raise SystemExit(f"the run {name!r} ended with {process.returncode}: its message is above")
    figures: dict[str, Any] = json.loads(last)
    return figures


# --- one run ---


def run(name: str, settings: dict[str, int]) -> dict[str, Any]:
    """Train `steps` steps; what they held at most."""
    import torch
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401  # so that it counts as a library

    from octavo import models
    from octavo.fp8.memory import count_saved

    how = RUNS[name]
    plain = not how
    libraries = resident()
    model = _model(torch.float32 if plain else torch.bfloat16)
    family = models.describe(model)
    blocks = family.layers(model)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (1, settings["tokens"]), generator=generator)
    loss_of, step = (_plain if plain else _octavo)(model, ids, how)
    meter = Meter(model, blocks, libraries)
    losses, seconds = [], []
    for number in range(settings["steps"]):
        began = time.perf_counter()
        meter.phase = "forward"
        if number == 0:
            with count_saved(model, blocks) as count:
                loss = loss_of()
            meter.counted(count.report(), family)
        else:
            loss = loss_of()
        losses.append(float(loss.detach()))
        meter.backward()
        meter.optimizer = step(loss, meter)
        del loss
        seconds.append(time.perf_counter() - began)
        peak = f"peak {meter.peak() / 1e6:,.0f} MB"
        print(f"step {number + 1}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s, {peak}", flush=True)
    meter.stop()
    return {
        "name": name,
        "params": sum(p.numel() for p in model.parameters()),
        "losses": losses,
        "seconds": min(seconds),
        "peak": meter.peak(),
        "phase": meter.where,
        "phases": meter.phases,
        "kinds": meter.kinds,
        "kept": {"activations": sum(meter.of_block.values()) + meter.outside, "logits": meter.logits},
    }


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _model(dtype: Any) -> Any:
    """The weights straight in their dtype, in small pieces: building must not be what takes most."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device="cpu").tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are computed, and were left empty
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            for rows in parameter.split(1024):
                rows.copy_(torch.randn(rows.shape, generator=generator).mul_(0.02))
    return model.train()


def _plain(model: Any, ids: Any, how: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[Any, Meter], Any]]:
    """Transformers' own loss on full logits, torch's own optimizer."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(loss: Any, meter: Meter) -> Any:
        loss.backward()
        meter.phase = "update"
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return optimizer

    return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss, step


def _octavo(model: Any, ids: Any, how: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[Any, Meter], Any]]:
    """The loss in chunks, FP8 optimizer states, and what else the run asks for."""
    import torch

    from octavo import fp8
    from octavo.fp8.memory import chunk_head
    from octavo.fp8.optim import UpdateInBackward

    head = chunk_head(model)
    if isinstance(head, str):
        raise SystemExit(head)
    fp8.apply(model, fp8.plan(model, fp8.Policy(**how["fp8"])))
    optimizer = fp8.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, states="fp8", master=how["master"])
    updating = UpdateInBackward(optimizer, model) if how.get("in_backward") else None
    target = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)

    def loss() -> Any:
        with head.losses(target) as losses:
            return losses.checked_losses(model(input_ids=ids, use_cache=False).logits).sum() / (ids.numel() - 1)

    def step(loss: Any, meter: Meter) -> Any:
        if updating:
            updating.run(lambda retain: loss.backward(retain_graph=retain))
        else:
            loss.backward()
            meter.phase = "update"
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return optimizer

    return loss, step


class Meter:
    """Watches the resident memory of this process from a thread, and records its contents at each new maximum.

    Weights, masters, gradients, optimizer states and codes are looked at in that moment. Of the activations that the
    first forward saved (counted by storages), those lie there whose block backward has not finished; logits, and what
    the head keeps, until its own backward has. The rest, "other", is what operations hold for
    a moment, and what the allocator has not given back. "libraries" is what was resident before the model was built.
    """

    def __init__(self, model: Any, blocks: Any, libraries: int) -> None:
        from octavo import fp8

        self.model, self.libraries, self.code_bytes = model, libraries, fp8.weight_cache_bytes
        self.optimizer: Any = None
        self.phase, self.where = "start", ""
        self.phases: dict[str, int] = {}
        self.kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.of_block: dict[str, int] = {}
        self.outside = self.logits = 0
        self._left: set[str] = set()
        self._head_left = False
        self._most = 0
        self._hook(blocks)
        self._going = True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def counted(self, plan: Any, family: Any) -> None:
        """What the forward saved, by block."""
        for row in plan.rows:
            if row.kind != "activation":
                continue
            if row.block:
                self.of_block[row.block] = self.of_block.get(row.block, 0) + row.bytes
            elif not row.module or family.component_of(row.module) == "lm_head":
                self.logits += row.bytes
            else:
                self.outside += row.bytes

    def backward(self) -> None:
        """From here on gradients come, and activations go."""
        self._left, self._head_left, self.phase = set(self.of_block), True, "backward"

    def peak(self) -> int:
        """The most bytes that the process ever held: the kernel's own count, which misses nothing between two looks."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
        raise SystemExit("memory.py reads VmHWM from /proc/self/status, which this system does not have: use Linux")

    def stop(self) -> None:
        self._going = False
        self._thread.join()
        self.kinds["other"] = self.peak() - sum(n for kind, n in self.kinds.items() if kind != "other")

    def _hook(self, blocks: Any) -> None:
        """A block's backward is over when its input's gradient is known, the head's when the last block's begins."""

        def over(name: str) -> Callable[..., None]:
            return lambda *_: self._left.discard(name)

        def head_over(*_: Any) -> None:
            self._head_left = False

        for name, block in blocks:
            block.register_full_backward_hook(over(name))
        blocks[-1][1].register_full_backward_pre_hook(head_over)

    def _watch(self) -> None:
        while self._going:
            held, phase = resident(), self.phase
            self.phases[phase] = max(self.phases.get(phase, 0), held)
            if held > self._most:
                self._most, self.where = held, phase
                self._note(phase)
            time.sleep(0.002)

    def _note(self, phase: str) -> None:
        weights = list(self.model.parameters())
        states = [list(s.items()) for s in list(self.optimizer.state.values())] if self.optimizer else []
        named = [(key, t) for items in states for key, t in items if hasattr(t, "nbytes")]
        self.kinds = {
            "weights": sum(p.nbytes for p in weights),
            "master": sum(t.nbytes for key, t in named if key in ("master", "master_low")),
            "gradients": sum(g.nbytes for g in [p.grad for p in weights] if g is not None),
            "optimizer": sum(t.nbytes for key, t in named if key not in ("master", "master_low")),
            "codes": self.code_bytes(self.model),
            "activations": sum(self.of_block[n] for n in list(self._left)) + (self.outside if self._left else 0),
            "logits": self.logits if self._head_left and phase == "backward" else 0,
            "libraries": self.libraries,
            "other": 0,
        }


# --- the record ---


def keep(runs: list[dict[str, Any]], settings: dict[str, int]) -> None:
    """The figures and the plot, with the machine, the versions and the commit."""
    from octavo.bench import record

    baseline = runs[0]["peak"]
    result = {
        "command": "python benchmarks/memory.py " + " ".join(f"{k}={v}" for k, v in settings.items()),
        "model": "Qwen2.5-0.5B's sizes, random weights",
        "settings": {**settings, "allocator": ALLOCATOR},
        "arms": [{**run, "times_less": round(baseline / run["peak"], 3)} for run in runs],
        "machine": record.describe_machine(),
    }
    record.save(result, RESULTS / "memory_cpu.json")
    draw(runs, settings, RESULTS / "memory_cpu.png")


COLOURS = ("#1d7f79", "#55a89f", "#c8571b", "#e4a36b", "#8d6cab", "#4e79a7", "#a0b7d3", "#9aa1a8", "#d5d9dd")


def draw(runs: list[dict[str, Any]], settings: dict[str, int], path: Path) -> None:
    """One bar a run, its kinds one after the other up to the peak."""
    from plot_canvas import INK, SOFT, canvas

    figure, (axes,) = canvas(9, 1.5 + 0.55 * len(runs))
    for y, run in enumerate(runs):
        left = 0.0
        for kind, colour in zip(KINDS, COLOURS, strict=True):
            size = run["kinds"][kind] / 1e9
            axes.barh(y, size, left=left, height=0.62, color=colour, label=kind if y == 0 else None)
            left += size
        ratio = "" if y == 0 else f" · {runs[0]['peak'] / run['peak']:.2f}x less"
        axes.text(left, y, f" {run['peak'] / 1e9:.2f} GB{ratio}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(runs)), [run["name"] for run in runs], fontsize=8, color=SOFT)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * max(run["peak"] for run in runs) / 1e9)
    axes.set_xlabel("GB resident when the process held most", fontsize=8, color=SOFT)
    title = f"Full-parameter steps of a 0.5 B model, {settings['tokens']} tokens, on the CPU: peak resident memory"
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.legend(ncols=len(KINDS), fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.22))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(run(sys.argv[2], json.loads(sys.argv[3]))))
    else:
        sys.exit(main(sys.argv[1:]))
