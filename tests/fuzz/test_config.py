"""Configurations, overrides, plan files, measurements and chat templates, damaged at random.

Each is read correctly, or rejected by an Octavo error that names the file or the override, quickly and briefly: no
other exception, no hang. A configuration that is read equals the one loaded from its resolved YAML.

    python -m tests.fuzz.test_config --cases 10000 --seed 1
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from torch import nn

from octavo import fp8, models
from octavo.config import Config, ConfigError, load_config, load_config_text, to_yaml
from octavo.config.sections.rl import BEYOND_SFT
from octavo.fp8.measuring.machine import Machine
from octavo.models.folder import chat
from tests.fuzz import mutate
from tests.fuzz.bounded import Finding, Hang, bounds, command

SECONDS, WALL_SECONDS, LETTERS = 5, 60, 20_000  # limits: processor time, wall time, length of a message

COMPLETE = """\
model: {path: ./m, freeze: [image_encoder, "**.layers.0.**"], load_in_fp8: {foundation: rowwise}}
fp8: &fp8
  recipe: rowwise
  image_projector: {recipe: blockwise, format: e4m3, wgrad: bf16}
  rules:
    - {match: "**.q_proj", recipe: off}
    - {match: model.*.mlp.**, recipe: tensorwise, format: hybrid}
lora: {rank: 8, alpha: 16.0, targets: [foundation], dropout: 0.1}
data:
  train: [{path: a.json, images: pictures, weight: 2.0, max_samples: 100}, {path: b.jsonl}]
  eval: [{path: c.json}]
  system: 'Answer: "briefly"'
train: {steps: 100, micro_batch: 2, global_batch: 8, lr: 3e-4, warmup: 5, recompute: full, seq_length: 1024}
optimizer: {betas: [0.9, 0.95], eps: 1e-8, states: fp8}
run: {dir: runs/x, seed: 1, eval_every: 10, save_every: 0x10}
"""
#: pieces to insert into YAML, or to replace one
PIECES = (
    *("&a", "*a", "<<: *fp8", "!!python/name:os.system", "- - -", "? ", ": ", "|", ">-", "'", '"', "{", "}", "[", "]"),
    *("---", "%YAML 1.1\n", "\t", "#", "\n", "\r", "\x00", "\ufeff", "\u2028", "\x85", "\\ud800", '"\\udc80"', '"\\0"'),
    *("1e400", "-0.0", ".nan", ".inf", "9" * 5000, "0x" + "f" * 900, "0o7", "1_000", "1e3", "off", "yes", "~", "null"),
    *("extends: config.yaml\n", "extends: /dev/zero\n", "x: 1\n" * 500, "[" * 200, "{a: " * 50, "- x\n" * 500),
    *("é" * 300, "/dev/zero"),
)  # fmt: skip
#: plausible mistakes
USUAL = ("1", "2", "100", "0.5", "3e-4", "true", "false", "off", "blockwise", "fp32", "auto", "'a b'", "[a, b]", "null")
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{% for m in messages %}<s>{{ m.role }}\n"
    "{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
JINJA = (
    *(
        "{% for i in range(90000) %}",
        "{% endfor %}",
        "{{ 'a' * 10**11 }}",
        "{{ 10**(10**9) }}",
        "{{ messages * 10**9 }}",
    ),
    *("{% if", "%}", "{{", "}}", "raise_exception('x')", "| tojson", "| list", ".x.y", "[0]", "{% set x = x ~ x %}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{#", "{% generation %}", "range(10**9)", "(", "**", "loop"),
)


def _pieces(rng: random.Random, text: str, pieces: tuple[str, ...]) -> str:
    """Insert a few pieces into a text, at line ends, at words or anywhere."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        edges = [i for i, c in enumerate(text) if c in rng.choice(("\n", " ", ":,{}[]", text))] or [0]
        at = rng.choice(edges) + rng.randrange(2)
        text = text[:at] + rng.choice(pieces) + text[at + rng.choice((0, 0, 1, 8)) :]
    return text


def _overrides(rng: random.Random) -> list[str]:
    """Make a few ``key=value`` overrides, most of them with existing keys."""
    every = [f"{top}.{key}" for top, field in Config.model_fields.items() for key in _keys(field.annotation)]
    phases = [key for key in every if key.startswith(BEYOND_SFT)]  # which the file's phase usually rejects
    keys = [key for key in every if key not in phases]
    keys += ["data.train.0.path", "data.train.1", "fp8.rules.0.match", "fp8.rules.9", "model", "lora", "x", ".", "a..b"]
    found = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 30))):
        key = rng.choice(phases if rng.random() < 0.1 else keys)
        if rng.random() < 0.5:
            found.append(f"{key}={rng.choice(USUAL)}")
            continue
        key = rng.choice((key, key, key, key + ".x", key + "." + "9" * rng.choice((1, 5000)), key * 3, key[:-1]))
        value = rng.choice((json.dumps(rng.choice(mutate.STRANGE)), str(rng.choice(mutate.STRANGE)), *PIECES))
        found.append(rng.choice((f"{key}={value}", f"{key}={value}", f"{key}=[{value}]", f"{key}={{a: {value}}}", key)))
    return found


def _keys(annotation: object) -> list[str]:
    kinds = [annotation, *getattr(annotation, "__args__", ())]
    return [key for kind in kinds for key in getattr(kind, "model_fields", ())]


def _text(rng: random.Random, folder: Path) -> None:
    kind = rng.randrange(4)
    raw = (
        mutate.damage(rng, COMPLETE.encode())
        if kind == 0
        else _pieces(rng, COMPLETE, PIECES).encode(errors="surrogatepass")
    )
    if kind == 1:
        raw = mutate.damage_json(rng, json.dumps(load_config_text(COMPLETE).model_dump(mode="json"))).encode()
    mutate.write(folder / "config.yaml", raw)
    _same(load_config(folder / "config.yaml"))


def _places(rng: random.Random, folder: Path) -> None:
    mutate.write(folder / "config.yaml", f"extends: base.yaml\n{COMPLETE}".encode())
    mutate.write(folder / "base.yaml", COMPLETE.encode())
    mutate.replace_file(rng, folder / rng.choice(("config.yaml", "base.yaml")))
    try:
        load_config(folder / "config.yaml")
    finally:
        for name in ("config.yaml", "base.yaml"):
            if (folder / name).is_dir():
                (folder / name).rmdir()


def _command(rng: random.Random, folder: Path) -> None:
    mutate.write(folder / "config.yaml", COMPLETE.encode())
    _same(load_config(folder / "config.yaml", _overrides(rng)))


def _same(config: Config) -> None:
    text = to_yaml(config)
    assert to_yaml(load_config_text(text)) == text, "it comes back different"


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(2))


def _plan(rng: random.Random, folder: Path) -> None:
    fp8.save_plan(fp8.plan(_Net(), "blockwise"), folder / "plan.json")
    _damaged(rng, folder / "plan.json")
    fp8.load_plan(folder / "plan.json", _Net())


def _measurements(rng: random.Random, folder: Path) -> None:
    entry = {"recipe": "rowwise", "backends": {"fwd": "triton"}, "seconds": 1e-3, "host": 1e-4}
    case = {
        "case": {"kind": "linear", "m": 64, "n": 32, "k": 32},
        "entries": {"high precision": entry, "rowwise": entry},
    }
    here = {"machine": Machine.detect("cpu").to_json(), "cases": [case]}
    mutate.write(folder / "m.json", json.dumps({"octavo_measurements": 1, "machines": [here]}).encode())
    _damaged(rng, folder / "m.json")
    fp8.MeasurementCache(folder / "m.json").load(Machine.detect("cpu"))


def _damaged(rng: random.Random, file: Path) -> None:
    raw = file.read_bytes()
    mutate.write(
        file, mutate.damage(rng, raw) if rng.random() < 0.4 else mutate.damage_json(rng, raw.decode()).encode()
    )


class _Processor(models.TextProcessor):
    """The part of a processor that formats conversations."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, conversation: list, **kwargs: object) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        with chat.deadline():
            return render_jinja_template([conversation], chat_template=self.chat_template, **kwargs)[0][0]


def _template(rng: random.Random, folder: Path) -> None:
    text = mutate.damage(rng, TEMPLATE.encode()).decode(errors="replace") if rng.random() < 0.3 else TEMPLATE
    mutate.write(folder / "chat_template.jinja", (text := _pieces(rng, text, JINJA)).encode())
    with mock.patch.multiple(chat, SECONDS=1, MEMORY=64 << 20):
        chat.check_template(_Processor(text), folder)


#: kind of input -> frequency, reader, and the error that it may raise
READERS: dict[str, tuple[int, Callable[[random.Random, Path], None], type[Exception]]] = {
    "text": (10, _text, ConfigError),
    "file": (2, _places, ConfigError),
    "override": (6, _command, ConfigError),
    "plan": (4, _plan, fp8.PlanError),
    "measurements": (2, _measurements, fp8.MeasureError),
    "template": (1, _template, models.ModelError),
}


def run(seed: int, cases: int, only: int | None = None, tally: Counter[str] | None = None) -> list[Finding]:
    """Return the findings; ``tally`` counts what was read and rejected."""
    found: list[Finding] = []
    tally = Counter() if tally is None else tally
    with tempfile.TemporaryDirectory() as folder:
        for number in range(cases) if only is None else [only]:
            rng = random.Random(f"{seed} {number}")
            kind = rng.choices(list(READERS), [often for often, _, _ in READERS.values()])[0]
            case = f"case {number} of seed {seed} ({kind})"
            with bounds(case, found, WALL_SECONDS, cpu=SECONDS):
                if why := _check_input(rng, kind, Path(folder), tally):
                    found.append(Finding(case, why))
    return found


def _check_input(rng: random.Random, kind: str, folder: Path, tally: Counter[str]) -> str | None:
    _, read, error = READERS[kind]
    try:
        read(rng, folder)
        tally[f"{kind}, read"] += 1
    except error as processor_error:
        tally[f"{kind}, refused"] += 1
        message = str(processor_error)
        if len(message) > LETTERS or not all(line.isprintable() for line in message.splitlines()):
            return f"{len(message)} letters, or some that nobody can print: {message[:200]!r}"
        if not any(name in message for name in (str(folder), "plan.json", "override")):
            return f"names neither file nor override: {message[:200]}"
    except BaseException as other:
        if isinstance(other, KeyboardInterrupt | Hang):
            raise
        return f"{type(other).__name__}: {str(other)[:200]}"
    return None


@pytest.mark.long
def test_damaged_configurations_are_read_or_rejected():
    tally: Counter[str] = Counter()
    assert run(13, 400, tally=tally) == []
    assert {f"{kind}, {what}" for kind in ("text", "override") for what in ("read", "refused")} <= set(tally)
    assert all(tally[f"{kind}, refused"] for kind in READERS)


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    try:
        command(partial(run, tally=counts), cases=200, seed=13, whole=True)
    finally:
        print(*(f"{what}: {n}" for what, n in sorted(counts.items())), sep="\n")
