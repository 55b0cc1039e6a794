"""Compares AdamW with 8-bit moments to AdamW with fp32 moments: the weights that it reaches, and its speed on the CPU.

    python benchmarks/optimizer.py [closed_loop] [training] [speed]

Writes results/optimizer_cpu.json and optimizer_cpu.png. It has three parts:

closed loop   Every optimizer gets the same gradients for hundreds of steps. Reported are the distance of its weights
              from those of fp32 moments, relative to the distance that these moved, and the number of second moments
              that became zero. Errors of single steps do not show whether they accumulate.
training      A small transformer learns scikit-learn's digits: loss curves and held-out accuracy.
speed         A step compared with torch's own AdamW, in turn in one run; only the ratio is meaningful.

COAT is measured as published ("COAT", `published_coat.py`) and in Octavo's format of this kind ("octavo coat").
torchao's 8-bit optimizers are included if torchao is installed (pip install torchao). Otherwise the file keeps their
rows of an earlier run, with its version.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import turns
from published_coat import PublishedCoat
from torch import Tensor, nn

from octavo import fp8
from octavo.bench import record
from octavo.fp8 import arithmetic

RESULTS = Path(__file__).resolve().parent / "results"
Make = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
SPEED = 100_000_000  # parameters
WINDOW = 10  # steps, of which a loss curve is the mean
CASES = {  # spread of gradients within a group (sigma of a log-normal), signal to noise, what is left at the end
    "decay to 1/100": (0.5, 0.3, 0.01),
    "wide, decay to 1/1000": (1.5, 0.3, 0.001),
    "steady, noisy": (1.0, 0.1, 1.0),
}


def contenders() -> tuple[dict[str, Make], dict[str, str]]:
    """The optimizers by name, and who could not take part, and why."""
    makers: dict[str, Make] = {
        f"octavo {states}": lambda params, lr, states=states: fp8.AdamW(params, lr=lr, states=states)
        for states in ("fp32", "bf16", "fp8", "coat")
    }
    makers["COAT"] = lambda params, lr: PublishedCoat(params, lr=lr)
    try:
        from torchao.optim import AdamW8bit, AdamWFp8
    except ImportError as error:
        return makers, {"torchao": f"not installed ({error}); pip install torchao"}
    torch.compiler.set_stance("force_eager")  # they compile their step, which changes no number that counts here
    makers["torchao AdamWFp8"] = lambda params, lr: AdamWFp8(params, lr=lr, weight_decay=0.0)
    makers["torchao AdamW8bit"] = lambda params, lr: AdamW8bit(params, lr=lr, weight_decay=0.0)
    return makers, {}


def second_moments(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> Tensor:
    """What an optimizer holds of v, decoded and flat."""
    if isinstance(optimizer, PublishedCoat):
        return optimizer.second_moments(p)
    state = optimizer.state[p]
    if isinstance(optimizer, fp8.AdamW):
        states = optimizer.param_groups[0]["states"]
        state = {
            k.name: state[k.name].view(-1, 128) if k.row is None else state[k.name] for k in arithmetic.LAYOUT[states]
        }
        return arithmetic.decode_moments(states, state)[1].flatten()
    v = state["exp_avg_sq"]
    return (v.dequantize() if hasattr(v, "dequantize") and type(v) is not Tensor else v).float().flatten()


def gradients(case: str, groups: int, steps: int) -> Iterator[Tensor]:
    sigma, signal, left = CASES[case]
    generator = torch.Generator().manual_seed(1)
    size = (torch.randn(groups, 1, generator=generator) * 2).exp() * 1e-4
    size = size * (torch.randn(groups, 128, generator=generator) * sigma).exp()
    mean = torch.randn(groups, 128, generator=generator) * signal
    for step in range(1, steps + 1):
        yield size * (mean + torch.randn(groups, 128, generator=generator)) * left ** (step / steps)


def closed_loop(makers: dict[str, Make], steps: int, groups: int = 32) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        params = {name: nn.Parameter(torch.zeros(groups, 128)) for name in makers}
        optimizers = {name: make([params[name]], 1e-3) for name, make in makers.items()}
        for g in gradients(case, groups, steps):
            for name, p in params.items():
                p.grad = g.clone()
                optimizers[name].step()
        reference = params["octavo fp32"].detach()
        nonzero = second_moments(optimizers["octavo fp32"], params["octavo fp32"]) > 0
        off = {name: float((p.detach() - reference).norm() / reference.norm()) for name, p in params.items()}
        for name, p in params.items():
            row = {"case": case, "steps": steps, "optimizer": name, "distance": off[name]}
            row["over_coat"] = off[name] / off["COAT"] if "COAT" in off else None
            row["zeroed"] = int((nonzero & (second_moments(optimizers[name], p) == 0)).sum())
            rows.append(row)
    return rows


class Reader(nn.Module):
    """Two transformer layers over the rows of an 8 x 8 picture."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 10)
        self.place = nn.Parameter(torch.randn(8, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x.view(-1, 8, 8)) + self.place).mean(1))


def training(makers: dict[str, Make], steps: int, seeds: int = 1) -> list[dict[str, Any]]:
    """Loss curves from the same start over the same batches. Needs scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    measured_rows = []
    for name, make in makers.items():
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = Reader()
            optimizer = make(list(model.parameters()), 1e-3)
            order = torch.Generator().manual_seed(seed)
            losses = []
            for step in range(steps):
                for group in optimizer.param_groups:
                    lr = 1e-3 * (1 - step / steps)
                    if isinstance(group["lr"], Tensor):
                        group["lr"].fill_(lr)
                    else:
                        group["lr"] = lr
                rows = torch.randint(0, 1500, (64,), generator=order)
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            with torch.no_grad():
                logits = model(x[1500:])
            row = {"optimizer": name, "seed": seed, **curve(losses)}
            if row["diverged_at"] is None:
                row["held_out_loss"] = float(nn.functional.cross_entropy(logits, y[1500:]))
                row["held_out_accuracy"] = float((logits.argmax(1) == y[1500:]).float().mean())
            measured_rows.append(row)
    return measured_rows


def curve(losses: list[float]) -> dict[str, Any]:
    """What is written of a run: where losses stopped being numbers, only those before, and no mean."""
    end = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    return {
        "steps": len(losses),
        "diverged_at": end,
        "mean_loss": statistics.fmean(losses) if end is None else None,
        "last_loss": statistics.fmean(losses[-50:]) if end is None else None,
        "losses": [round(value, 5) for value in losses[:end]],
    }


def speed(count: int = SPEED, rounds: int = 4) -> list[dict[str, Any]]:
    """Seconds of a step, the smallest over rounds in which everybody has a turn, and ratios to torch's two: what else
    the machine does only adds to a time."""
    weights = {dtype: torch.randn(count // 2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    grads = {dtype: torch.randn(count // 2).to(dtype) for dtype in weights}

    def make(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype) -> Any:
        params = [nn.Parameter(weights[dtype].clone()) for _ in range(2)]
        for p in params:
            p.grad = grads[dtype]
        optimizer = build(params)
        optimizer.step()
        return optimizer

    full, half = torch.float32, torch.bfloat16
    optimizers = {
        "torch default": make(lambda p: torch.optim.AdamW(p), full),
        "torch fused": make(lambda p: torch.optim.AdamW(p, fused=True), full),
    }
    for states, master, dtype in [
        ("fp32", "fp32", full),
        ("bf16", "fp32", full),
        ("fp8", "fp32", full),
        ("fp8", "bf16+16", half),
        ("fp8", "bf16+sr", half),
    ]:
        optimizers[f"octavo {states}, master {master}"] = make(
            lambda p, states=states, master=master: fp8.AdamW(p, states=states, master=master), dtype
        )
    taken = turns.take({name: optimizer.step for name, optimizer in optimizers.items()}, rounds)
    least = {name: min(each.seconds) for name, each in taken.items()}
    return [
        {
            "optimizer": name,
            "parameters": count,
            "seconds": seconds,
            "over_torch_default": seconds / least["torch default"],
            "over_torch_fused": seconds / least["torch fused"],
            "turns": rounds,
        }
        for name, seconds in least.items()
    ]


def of_earlier(earlier: dict[str, Any], part: str, absent: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Rows that a file has of a part (of peers that are absent now, where they are named), each with its run."""
    version = earlier.get("machine", {}).get("octavo")
    rows = [row for row in earlier.get(part, []) if absent is None or row["optimizer"].split()[0] in absent]
    return [{**row, "of_earlier_run": row.get("of_earlier_run", version)} for row in rows]


def plot(result: dict[str, Any], path: Path) -> None:
    from plot_canvas import canvas

    figure, (left, right) = canvas(11, 4.2, columns=2)
    looped = {row["optimizer"] for row in result["closed_loop"]} - {"octavo fp32"}
    names = [row["optimizer"] for row in result["training"] if row["seed"] == 0 and row["optimizer"] in looped]
    longest = max(row["steps"] for row in result["closed_loop"])
    for i, case in enumerate(CASES):
        rows = {r["optimizer"]: r for r in result["closed_loop"] if r["case"] == case and r["steps"] == longest}
        heights = [rows[name]["distance"] for name in names]
        left.barh([k + 0.25 * (1 - i) for k in range(len(names))], heights, height=0.25, label=case)
    left.set_yticks(range(len(names)), names)
    left.set_xscale("log")
    left.invert_yaxis()
    left.set_title(f"Distance from fp32 moments' weights over distance travelled, {longest} steps", fontsize=9)
    left.legend(fontsize=8)
    for row in result["training"]:
        if row["seed"] == 0:
            shown = torch.tensor(row["losses"])
            window = min(WINDOW, len(shown))
            shown = shown.unfold(0, window, 1).mean(1) if window else shown
            note = "" if row["diverged_at"] is None else f" (NaN from step {row['diverged_at']})"
            right.plot(range(window, window + len(shown)), shown, label=row["optimizer"] + note, linewidth=1)
    right.set_yscale("log")
    right.set_ylim(0.03, 4)
    right.set_title("Loss of a small transformer on digits (mean of 10 steps)", fontsize=9)
    right.set_xlabel("step")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def measured(part: str, makers: dict[str, Make]) -> list[dict[str, Any]]:
    """The rows of one part of the file, printed as they are written."""
    if part == "speed":
        rows = speed()
    else:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # small tensors: a second thread would only be waited for
        if part == "training":
            rows = training(makers, 200)
        else:
            rows = [row for steps in (200, 600) for row in closed_loop(makers, steps)]
        torch.set_num_threads(threads)
    for row in rows:
        shown = [value for name, value in row.items() if name != "losses"]
        print(*(f"{value:.4g}" if isinstance(value, float) else value for value in shown), sep="  ", flush=True)
    return rows


def main(parts: list[str]) -> None:
    """Measure `parts` (all of them where none is named); the file keeps what it has of the others, and of peers that
    are absent."""
    known = ("closed_loop", "training", "speed")
    if unknown := set(parts) - set(known):
        raise SystemExit(f"{', '.join(sorted(unknown))}: no such part; there are {', '.join(known)}.")
    path = RESULTS / "optimizer_cpu.json"
    earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    result = {part: of_earlier(earlier, part) for part in known if part in earlier and part not in (parts or known)}
    makers, absent = contenders()
    for peer, why in absent.items():
        print(f"{peer}: {why}; its rows in the file stay as an earlier run wrote them", flush=True)
    for part in parts or known:
        result[part] = measured(part, makers) + of_earlier(earlier, part, absent)
        result.update(command="python benchmarks/optimizer.py", absent=absent, machine=record.describe_machine())
        record.save(result, path)
    if all(part in result for part in known):
        plot(result, path.with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1:])
