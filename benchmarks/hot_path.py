"""Counts the files of Octavo that one call, or one trip through a run, passes through.

    python benchmarks/hot_path.py [--recipe blockwise] [--json FILE]      one call of an FP8 linear layer
    python benchmarks/hot_path.py --trip row|grpo|yaml|cast [--json FILE]      one trip through a run

**A layer.** ``sys.setprofile`` counts Octavo's own Python functions in one forward and one backward of a warm layer in
training. A change of file is a call to, or a return from, a function in a different file.

**A trip** counts the files of ``octavo/`` in which a function ran, on the CPU, with tiny Qwen3-VL. A comprehension or
a lambda belongs to its file. Bodies of modules and classes, and code that runs during an import, are not counted, so a
count does not depend on earlier imports. Only the thread of the trip is counted: other threads, such as the one that
renews the run lock, run at arbitrary times. Other processes are not counted either: a reward file has its own process,
and so would data workers (there are none here).

    row    a row with an image becomes a batch: the second one that ``octavo.data.train_loader`` gives
    grpo   the second step of GRPO with a reward file: rollout, rewards, advantages, loss, backward, update, from the
           callbacks' ``before_step`` to their ``after_step``; without assembling the run, reading the prompts of the
           step, and writing its row and checkpoints
    yaml   ``octavo train FILE``, from the command line until a file of ``octavo.fp8.kernels`` is entered, where the
           plan lists the available kernels
    cast   as yaml, until the first FP8 cast of a tensor with values
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from PIL import Image

from octavo import data, fp8, models, rl, train
from octavo.cli.main import main as octavo
from octavo.config import load_config

ROOT = Path(fp8.__file__).parents[1]
KERNELS, CASTS = "fp8/kernels/", "fp8/arithmetic/cast.py"


class _Done(BaseException):
    """Ends a run that has been followed as far as it is counted; not an Exception, which a run would report."""


class Trip:
    """The files of a folder in which this thread runs a function between `start` and `stop`, in the order of their
    first one. `passed` is called with each file and the code of each function that runs in it."""

    def __init__(self, passed: Callable[[str, CodeType], None] = lambda file, code: None, folder: Path = ROOT) -> None:
        self.files: list[str] = []
        self.functions: set[tuple[str, str]] = set()
        self._passed, self._folder = passed, folder
        self._thread: int | None = None  # the one that is followed
        self._importing = 0  # module bodies of the folder that run in it
        self._names: dict[CodeType, str | None] = {}

    def start(self) -> None:
        self._thread = threading.get_ident()
        if sys.version_info >= (3, 12):
            self._monitor()
        else:
            sys.setprofile(self._profile)

    def stop(self) -> None:
        """Harmless where nothing was started, or it was stopped before."""
        if self._thread is not None and sys.version_info >= (3, 12):
            sys.monitoring.set_events(sys.monitoring.PROFILER_ID, sys.monitoring.events.NO_EVENTS)
            sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)
        elif self._thread is not None:
            sys.setprofile(None)
        self._thread = None

    def _monitor(self) -> None:
        tool, on = sys.monitoring.PROFILER_ID, sys.monitoring.events
        sys.monitoring.use_tool_id(tool, "octavo trip")
        for event in (on.PY_START, on.PY_RESUME):
            sys.monitoring.register_callback(tool, event, lambda code, offset: self._enter(code))
        for event in (on.PY_RETURN, on.PY_UNWIND):
            sys.monitoring.register_callback(tool, event, lambda code, offset, value: self._leave(code))
        sys.monitoring.set_events(tool, on.PY_START | on.PY_RESUME | on.PY_RETURN | on.PY_UNWIND)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._enter(frame.f_code)
        elif event == "return":
            self._leave(frame.f_code)

    def _name(self, code: CodeType) -> str | None:
        """The file that a function's or module's body is in, seen from the folder; None outside it."""
        if code not in self._names:
            file = Path(code.co_filename)
            self._names[code] = file.relative_to(self._folder).as_posix() if file.is_relative_to(self._folder) else None
        return self._names[code]

    def _enter(self, code: CodeType) -> None:
        if threading.get_ident() != self._thread or (file := self._name(code)) is None:
            return
        if code.co_name == "<module>":
            self._importing += 1
        elif code.co_flags & inspect.CO_OPTIMIZED and not self._importing:  # without the flag: a class body
            if file not in self.files:
                self.files.append(file)
            if not code.co_name.startswith("<"):
                self.functions.add((file, code.co_qualname))
            self._passed(file, code)

    def _leave(self, code: CodeType) -> None:
        if threading.get_ident() == self._thread and code.co_name == "<module>" and self._name(code) is not None:
            self._importing -= 1

    @property
    def result(self) -> dict[str, Any]:
        return {"count": len(self.files), "functions": len(self.functions), "files": [*self.files]}


def _write_inputs(folder: Path) -> None:
    """Tiny Qwen3-VL, four images with a conversation and a prompt each, and a reward file."""
    with contextlib.redirect_stdout(io.StringIO()):
        octavo(["tiny", "qwen3_vl", str(folder / "model")])
    rows, prompts = [], []
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 80, 200)).save(folder / f"{number}.png")
        question = {"role": "user", "content": f"<image>How red is picture {number}?"}
        answer = {"role": "assistant", "content": f"{60 * number} of 255"}
        rows.append({"messages": [question, answer], "images": [f"{number}.png"]})
        prompts.append({"prompt": [question], "images": [f"{number}.png"], "answer": str(60 * number)})
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "prompts.json").write_text(json.dumps(prompts))
    (folder / "rewards.py").write_text(
        "def score(completions, answer, **columns):\n    return [len(text) % 3 for text in completions]\n"
    )


def _config(folder: Path, name: str, rows: str, settings: str) -> Path:
    """Write the configuration of a run that is named `name`."""
    file = folder / f"{name}.yaml"
    file.write_text(
        f"model: {{path: model}}\nfp8: {{recipe: blockwise}}\n"
        f"data: {{train: [{{path: {rows}}}], workers: 0}}\n{settings}\n"
        f"run: {{dir: {folder / name}, hf: false, tensorboard: false, threads: 1}}\n"
    )
    return file


_SFT = "train: {steps: 2, seq_length: 128, micro_batch: 1, global_batch: 1, lr: 1e-3}"
_GRPO = (
    "train: {phase: rl, steps: 3, seq_length: 128, micro_batch: 4, lr: 1e-3}\n"
    "rl: {algorithm: grpo, prompts: 2, group: 2, max_new_tokens: 2, rewards: ['rewards.py:score']}"
)


def _row(folder: Path) -> dict[str, Any]:
    cfg = load_config(_config(folder, "row", "rows.json", _SFT))
    loader, trip = data.train_loader(cfg, models.load_processor(cfg.model.path)), Trip()
    try:
        next(loader)
        trip.start()
        next(loader)
    finally:
        trip.stop()
        loader.close()
    return trip.result


class _SecondStep(train.Callback):
    def __init__(self, trip: Trip) -> None:
        self.trip = trip

    def before_step(self, run: train.Run, number: int, batches: Any) -> None:
        if number == 2:
            self.trip.start()

    def after_step(self, run: train.Run, step: train.Step) -> None:
        if step.number == 2:
            self.trip.stop()
            raise _Done


def _grpo(folder: Path) -> dict[str, Any]:
    cfg = load_config(_config(folder, "grpo", "prompts.json", _GRPO))
    trip = Trip()
    try:
        rl.run(cfg, callbacks=[_SecondStep(trip)])
    except _Done:
        pass
    finally:
        trip.stop()
    return trip.result


def _yaml(folder: Path, name: str = "yaml", cast: bool = False) -> dict[str, Any]:
    """Until a file of the kernels is entered; with `cast` until values are cast."""
    file = _config(folder, name, "rows.json", _SFT)

    def passed(file: str, code: CodeType) -> None:
        # The plan of the memory casts tensors without values, for their shapes: that is not yet a cast.
        if (file == CASTS and code.co_name == "_encode") if cast else file.startswith(KERNELS):
            raise _Done

    trip = Trip(passed)
    try:
        trip.start()
        with contextlib.redirect_stdout(io.StringIO()):
            octavo(["train", str(file)])
        raise RuntimeError(f"octavo train {file} came to no {'cast' if cast else 'kernel'}")
    except _Done:
        return trip.result
    finally:
        trip.stop()


def _cast(folder: Path) -> dict[str, Any]:
    return _yaml(folder, "cast", cast=True)


TRIPS = {"row": _row, "grpo": _grpo, "yaml": _yaml, "cast": _cast}


def follow(trip: str, folder: Path) -> dict[str, Any]:
    """The files and how many functions a trip goes through, in an empty folder, or in the folder of another trip."""
    if not (folder / "model").exists():
        _write_inputs(folder)
    return {"trip": trip, **TRIPS[trip](folder)}


def seen(call: Any) -> dict[str, Any]:
    """Files in the order of their first function, how often the file changed, and how many functions were called."""
    visited: list[str] = []
    calls = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        where = frame if event == "call" else frame.f_back
        if event not in ("call", "return") or where is None:
            return
        file = Path(where.f_code.co_filename)
        if file.is_relative_to(ROOT):
            calls += event == "call"
            visited.append(str(file.relative_to(ROOT)))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    changes = sum(a != b for a, b in zip(visited, visited[1:], strict=False))
    return {"files": list(dict.fromkeys(visited)), "changes": changes, "calls": calls}


def lines_of_forward() -> int:
    """Lines of the forward of a layer's autograd function, its signature included."""
    module = inspect.getmodule(fp8.Linear)
    assert module is not None
    tree = ast.parse(inspect.getsource(module))
    function_class = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "_Fp8Linear")
    forward = next(n for n in function_class.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    assert forward.end_lineno is not None
    return forward.end_lineno - forward.lineno + 1


def measure(recipe: str) -> dict[str, Any]:
    """What one forward and one backward of a warm layer pass through."""
    layer: Any = torch.nn.Sequential(torch.nn.Linear(256, 256))
    fp8.apply(layer, fp8.plan(layer, recipe))
    x = torch.randn(256, 256, requires_grad=True)
    layer(x).sum().backward()  # warm: imports, choices that are remembered, weight codes
    outputs = []
    result = {"recipe": recipe, "forward": seen(lambda: outputs.append(layer(x)))}
    dy = torch.ones_like(outputs[0])
    with torch.autograd.set_multithreading_enabled(False):
        result["backward"] = seen(lambda: outputs[0].backward(dy))
    return result | {"forward_lines": lines_of_forward()}


def _print_trip(result: dict[str, Any]) -> None:
    print(f"{result['trip']}: {result['count']} files, {result['functions']} functions")
    for file in result["files"]:
        print(f"    {file}")


def _print_layer(result: dict[str, Any]) -> None:
    for way in ("forward", "backward"):
        through = result[way]
        print(f"{way}: {len(through['files'])} files, {through['changes']} changes of file, {through['calls']} calls")
        for file in through["files"]:
            print(f"    {file}")
    print(f"_Fp8Linear.forward: {result['forward_lines']} lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="blockwise", choices=fp8.RECIPES)
    parser.add_argument("--trip", choices=TRIPS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.trip:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with a GPU it would be another way
        with tempfile.TemporaryDirectory() as folder:
            result = follow(args.trip, Path(folder))
        _print_trip(result)
    else:
        result = measure(args.recipe)
        _print_layer(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
