"""Compares training from files with a plain loop and HF Trainer: tokens per CPU second, on new rows.

    python benchmarks/rows.py [--sets text,digits,photographs] [--rounds 5] [--out FILE.json]

    text         handwriting drawn in characters, 83 tokens per row (`octavo digits`), the tiny Qwen3
    digits       images of 16 x 16 pixels with four questions and answers, the tiny Qwen3-VL
    photographs  crops of the pictures that scikit-learn and matplotlib ship, JPEG, 0.1 to 0.3 megapixels, one question

All candidates use the same rows (each once, shuffled), the same initial weights, batches of 8, fp32 on one thread,
AdamW and the same clipping, and prepare rows in the training process. They run in turn:

    octavo       octavo.train.run, recipe off, as `octavo train` calls it; metrics.jsonl is written
    plain loop   a DataLoader whose collate calls the stock chat template and processor for the batch; labels are all
                 tokens except padding and images; forward, backward, clip, step
    Trainer      HF Trainer with the rows and collate of this DataLoader

Octavo's labels are only the answers, which it must locate; the labels of the others cost almost nothing. Times are CPU
seconds of the process over all threads, from the end of the third step on. Ratios are paired by round: the geometric
mean and its 95 % interval. `path` is measured without a model: milliseconds per row until its batch is ready. Other
sets in FILE.json are kept.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import turns
from PIL import Image
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from octavo import data, models, train
from octavo.bench import record
from octavo.config import Config
from octavo.data.builtin import digits
from octavo.models.tiny import tiny

BATCH, FIRST = 8, 3  # rows of a step; steps before the clock
STEPS = {"text": 32, "digits": 24, "photographs": 5}  # of a turn, after the first ones
LR, CLIP = 1e-3, 1.0


@dataclass
class Clock:
    """CPU seconds and tokens of the steps after the first ones."""

    began: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    waiting: int = field(default=0, repr=False)

    def batch(self, tokens: int) -> None:
        self.waiting += tokens

    def step(self) -> None:
        self.steps += 1
        if self.steps == FIRST:
            self.began = time.process_time()
        elif self.steps > FIRST:
            self.seconds, self.tokens = time.process_time() - self.began, self.tokens + self.waiting
        self.waiting = 0


@dataclass(frozen=True)
class Rows:
    """A set of rows in LLaVA's format, and the tiny model that learns from it."""

    model: Path
    file: Path
    images: Path | None

    @property
    def listed(self) -> list[dict[str, Any]]:
        return json.loads(self.file.read_text())


def photographs(folder: Path, count: int) -> Path:
    """Crops of real pictures, with a question each."""
    import matplotlib
    import sklearn

    shipped = [Path(sklearn.__file__).parent / "datasets/images" / name for name in ("china.jpg", "flower.jpg")]
    shipped.append(Path(matplotlib.__file__).parent / "mpl-data/sample_data/grace_hopper.jpg")
    answers = ("Roofs of a temple in China.", "A flower.", "A woman in uniform.")
    folder.mkdir()
    draw, rows = random.Random(0), []
    for number in range(count):
        with Image.open(shipped[number % 3]) as whole:
            width, height = (draw.randint(side * 2 // 3, side) for side in whole.size)
            left, top = draw.randint(0, whole.width - width), draw.randint(0, whole.height - height)
            whole.crop((left, top, left + width, top + height)).save(folder / f"{number}.jpg", quality=90)
        said = [("human", "<image>\nWhat is to be seen?"), ("gpt", answers[number % 3])]
        rows.append({"image": f"{number}.jpg", "conversations": [{"from": who, "value": text} for who, text in said]})
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def written(folder: Path, name: str, count: int) -> Rows:
    """`count` rows of a set, and its model."""
    model = tiny.write("qwen3" if name == "text" else "qwen3_vl", folder / f"model-{name}")
    if name == "photographs":
        return Rows(model, photographs(folder / name, count), folder / name)
    files = digits.write(folder / name, train=max(count, 256), test=1)
    file = files.directory / ("train_text.json" if name == "text" else "train.json")
    file.write_text(json.dumps(json.loads(file.read_text())[:count]))
    return Rows(model, file, None if name == "text" else files.directory)


class Plain:
    """A batch as scripts make it: the stock template and processor, called once for its rows."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.processor = models.load_processor(rows.model) if rows.images else None
        self.tokenizer = AutoTokenizer.from_pretrained(rows.model)

    def loader(self) -> DataLoader:
        order = torch.Generator().manual_seed(0)
        return DataLoader(self.rows.listed, BATCH, shuffle=True, collate_fn=self, generator=order)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        talks = [[self._turn(turn) for turn in row["conversations"]] for row in rows]
        if self.processor is None:
            texts = self.tokenizer.apply_chat_template(talks, tokenize=False)
            batch = self.tokenizer(texts, padding=True, return_tensors="pt")
        else:
            texts = ProcessorMixin.apply_chat_template(self.processor, talks, tokenize=False)
            images = [[Image.open(self.rows.images / row["image"]).convert("RGB")] for row in rows]
            batch = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
        labels = batch["input_ids"].clone()
        labels[batch["attention_mask"] == 0] = -100
        if self.processor is not None:
            labels[labels == self.processor.image_token_id] = -100
        return {**batch, "labels": labels}

    def _turn(self, turn: dict[str, str]) -> dict[str, Any]:
        role, text = {"human": "user", "gpt": "assistant"}[turn["from"]], turn["value"]
        if self.processor is None:
            return {"role": role, "content": text}
        image = [{"type": "image"}] if text.startswith("<image>") else []
        return {"role": role, "content": [*image, {"type": "text", "text": text.removeprefix("<image>")}]}

    def model(self) -> torch.nn.Module:
        auto = AutoModelForImageTextToText if self.processor else AutoModelForCausalLM
        return auto.from_pretrained(self.rows.model, dtype=torch.float32).train()


def config(rows: Rows, folder: Path) -> Config:
    """The configuration of Octavo's run."""
    count = len(rows.listed)
    return Config.model_validate({
        "model": {"path": str(rows.model)},
        "fp8": {"recipe": "off"},
        "data": {"train": [{"path": str(rows.file)}], "workers": 0},
        "train": {"steps": count // BATCH, "seq_length": 1024, "micro_batch": BATCH, "global_batch": BATCH, "lr": LR,
                  "schedule": "constant", "warmup": 0, "clip": CLIP},
        "run": {"dir": str(folder / "run"), "save_every": 0, "health_every": 0, "hf": False, "tensorboard": False,
                "threads": 1},
    })  # fmt: skip


class Listening(train.Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def end_step(self, run: Any, step: Any) -> None:
        self.clock.batch(step.row["tokens"])
        self.clock.step()


def octavo(rows: Rows) -> Clock:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        train.run(config(rows, Path(folder)), callbacks=[Listening(clock)])
    return clock


def plain(rows: Rows) -> Clock:
    clock, peer = Clock(), Plain(rows)
    torch.manual_seed(0)
    model = peer.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for batch in peer.loader():
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.batch(int(batch["attention_mask"].sum()))
        clock.step()
    return clock


class Counting(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.step()


def trainer(rows: Rows) -> Clock:
    clock, peer = Clock(), Plain(rows)

    def collate(listed: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = peer(listed)
        clock.batch(int(batch["attention_mask"].sum()))
        return batch

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=LR, max_grad_norm=CLIP,
            lr_scheduler_type="constant", remove_unused_columns=False, report_to="none", save_strategy="no",
            use_cpu=True, disable_tqdm=True, logging_strategy="no", optim="adamw_torch",
        )  # fmt: skip
        hf_trainer = Trainer(peer.model(), arguments, collate, rows.listed, callbacks=[Counting(clock)])
        hf_trainer.train()
    return clock


def path(rows: Rows) -> dict[str, Iterator[Any]]:
    """Batches without a model."""
    with tempfile.TemporaryDirectory() as folder:
        ours = data.train_loader(config(rows, Path(folder)), models.load_processor(rows.model))
    return {"octavo": iter(ours), "plain loop": iter(Plain(rows).loader())}


def measured(rows: Rows, rounds: int, steps: int) -> dict[str, Any]:
    """Everybody in turns."""
    ways = {"octavo": octavo, "plain loop": plain, "Trainer": trainer}
    clocks: dict[str, list[Clock]] = {name: [] for name in ways}
    paths: dict[str, list[float]] = {"octavo": [], "plain loop": []}
    for number in range(rounds + 1):
        for name, way in ways.items():
            clock = way(rows)
            if number:  # the first warms caches
                clocks[name].append(clock)
        for name, stream in path(rows).items():  # new ones each round: Octavo keeps what it has made
            began = time.process_time()
            for _ in range(steps):
                next(stream)
            if number:
                paths[name].append((time.process_time() - began) / steps / BATCH * 1e3)
    each = {name: [clock.seconds / clock.tokens for clock in by_way] for name, by_way in clocks.items()}
    by_way = {
        name: {"tokens_per_cpu_s": 1 / statistics.median(seconds)}
        | ({} if name == "octavo" else turns.interval(seconds, each["octavo"]))
        for name, seconds in each.items()
    }
    tokens = clocks["octavo"][0]
    return {
        "tokens_a_row": tokens.tokens / (tokens.steps - FIRST) / BATCH,
        "ways": by_way,
        **({"image_processor": type(Plain(rows).processor.image_processor).__name__} if rows.images else {}),
        "path_ms_a_row": {name: statistics.median(taken) for name, taken in paths.items()},
        "path": turns.interval(paths["plain loop"], paths["octavo"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(STEPS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    sets = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.sets.split(","):
            rows = written(Path(folder), name, (FIRST + STEPS[name]) * BATCH)
            sets[name] = measured(rows, args.rounds, STEPS[name])
            print(f"{name}: {sets[name]['tokens_a_row']:.0f} tokens a row", flush=True)
            for way, row in sets[name]["ways"].items():
                beside = f"octavo {row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})" if "ratio" in row else ""
                print(f"  {way:12} {row['tokens_per_cpu_s']:8.0f} tokens a CPU second  {beside}")
            alone = sets[name]["path"]
            ours, theirs = sets[name]["path_ms_a_row"].values()
            print(f"  path only: {ours:.2f} ms a row, plain {theirs:.2f}: {alone['ratio']:.2f} "
                  f"({alone['low']:.2f} to {alone['high']:.2f})", flush=True)  # fmt: skip
    if args.out:
        about = {"command": f"python benchmarks/rows.py --sets {args.sets} --rounds {args.rounds}"}
        before = record.load(args.out)["sets"] if args.out.exists() else {}
        record.save({**about, "machine": record.describe_machine(), "sets": {**before, **sets}}, args.out)


if __name__ == "__main__":
    main()
