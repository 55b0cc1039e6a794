"""Randomly damaged configurations of other frameworks are translated or rejected with a message, in bounded time.

No case may raise a different exception, hang, read a file outside the folder or produce text that cannot be encoded. A
translation must have exactly one row per key in its report.

    python -m tests.fuzz.test_import --cases 5000 --seed 1
"""

from __future__ import annotations

import copy
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from octavo.config import ConfigError
from octavo.config.yaml.document import read_text
from octavo.importers import TranslateError, markdown, to_json, translate
from tests.fuzz import mutate
from tests.fuzz.bounded import Finding, Hang, bounds, command

HERE = Path(__file__).resolve().parents[1] / "importers"
#: files of each framework, which are damaged
FILES = [*sorted((HERE / "theirs").iterdir()), *sorted((HERE.parents[1] / "examples" / "import").glob("*.[ys]*"))]
SECONDS, WALL_SECONDS, LETTERS = 5, 120, 20_000  # of processor time, by the clock, of a message

#: values that replace others
STRANGE = (
    *mutate.STRANGE, "\ud800", "a\udfffb", "${a}", "${a.b}${a.b}", "${oc.env:HOME}", "${oc.env:X,7}", "$X",
    "$(reboot)",
    "1e400", ".nan", "-1e308", "0x" + "f" * 300, "9" * 1200, "1,2,x", "1ba", "1e999ep", "1.2.3tok", "9" * 400 + "dur",
    "fast", "/etc/passwd", "/dev/zero", "../..", "~", "[", '{"min_lr": []}', "[" * 2000, "a/b", "org/Qwen3-VL-2B",
    "../outside", "z2.json", ".", "config.json", 2**62, -(2**62), 1e18, [1, [2]], {"a": {"b": {}}}, ["\ud800"],
    [None, None], [[]] * 3, "true", "none", "auto",
)  # fmt: skip
#: lines and words that are inserted into files
PIECES = (
    '"\\ud800": 1\n', 'x: "${x}"\n', 'a: {b: "${a.c}", c: "${a.b}"}\n', "\x00", "\ufeff", "${", "}", "---\n", "&a ",
    "*a", "<<: {a: 1}\n", "- \n", '"', "'", "\\", "$(", "`", "${A:-", ")", "(", "\n", "#", " --lr fast ", "é" * 40,
    " --x.9999999999.y 1 ", " --datasets.99999999.path a ", "A=$A$A\n", "export B=\n", "--",
)  # fmt: skip


def _tree(path: Path) -> Any:
    """Return the values of a file without resolving its references."""
    return read_text(path.read_text(encoding="utf-8"), path.name).value


def _circles(rng: random.Random, tree: dict[str, Any]) -> None:
    """Add a chain of references, which may double in each of many keys."""
    count = rng.choice((1, 2, 3, 50))
    end = rng.choice(("${z0}", "x", "1"))
    for number in range(count):
        tree[f"z{number}"] = f"${{z{number + 1}}}" * rng.choice((1, 2)) if number + 1 < count else end
    holder, key = rng.choice(mutate.places(tree))
    holder[key] = "${z0}"


def _damaged(rng: random.Random, path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        for _ in range(rng.choice((1, 1, 2, 5))):
            word = rng.choice([*re.finditer(r"\S+", text)])
            piece = str(rng.choice((*PIECES, *STRANGE))).encode("utf-8", "replace").decode()
            text = text[: word.start()] + piece + text[rng.choice((word.start(), word.end())) :]
        return text
    kind = rng.random()
    if kind < 0.25:
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.choice([m.end() for m in re.finditer(r"\n|: |$", text)])
            text = text[:at] + rng.choice(PIECES) + text[at:]
        return text
    tree = _tree(path)
    if kind < 0.35:
        _circles(rng, tree)
    for _ in range(rng.choice((0, 1, 1, 2, 6)) if kind < 0.35 else rng.choice((1, 1, 2, 6))):
        holder, key = rng.choice(mutate.places(tree))
        if rng.random() < 0.9:
            holder[key] = copy.deepcopy(rng.choice(STRANGE))
        else:
            tree = mutate.strange(rng, tree)
            if not isinstance(tree, dict) or not tree:
                break
    return json.dumps(tree)


def _side_files(rng: random.Random, folder: Path) -> None:
    """Write the files that configurations refer to, possibly damaged: config.json, dataset_info.json, DeepSpeed."""
    config = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
              "text_config": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}}  # fmt: skip
    register = {"some_texts": {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "talk"},
                "tags": {"role_tag": "from"}}, "a": {"hf_hub_url": "org/d", "split": "test"}}  # fmt: skip
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    for name, value in (("config.json", config), ("data/dataset_info.json", register), ("z2.json", zero)):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        if rng.random() < 0.1:
            file.symlink_to(folder.parent / "outside")
        else:
            file.write_text(json.dumps(mutate.strange(rng, value) if rng.random() < 0.7 else value))


def run(seed: int, cases: int) -> list[Finding]:
    """Translate damaged files. A finding is an unexpected exception, a hang, or text that cannot be encoded."""
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "in"
        folder.mkdir()
        (Path(place) / "outside").write_text("{}")
        _watch()
        for number in range(cases):
            rng = random.Random(f"{seed}/{number}")
            path = rng.choice(FILES)
            case = f"{path.name} seed {seed} case {number}"
            _side_files(rng, folder)
            file = folder / f"a{path.suffix}"
            file.write_text(_damaged(rng, path), encoding="utf-8", errors="replace")
            del _opened[1:]
            with bounds(case, found, WALL_SECONDS, cpu=SECONDS, forks=False):
                _one(rng, file, folder, case, found)
            found += [Finding(case, f"read {path}") for path in _opened[1:]]
    return found


#: paths that files in the folder refer to and that must not be read
_OUTSIDE = ("/etc/passwd", "/dev/zero", "outside")
_opened: list[str] = []


def _watch() -> None:
    """Record every opened path outside the folder. The hook is added once, because it cannot be removed."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(_OUTSIDE):
            _opened.append(arguments[0])

    if not _opened:
        _opened.append("")
        sys.addaudithook(hook)


def _one(rng: random.Random, file: Path, folder: Path, case: str, found: list[Finding]) -> None:
    more = {"framework": rng.choice((None, None, "axolotl", "mindspeed-mm")), "world": rng.choice((None, 8))}
    try:
        made = translate([file], folder.parent / "out.yaml", root=folder, variables={"MODEL": "."}, **more)
        for text in (made.content, markdown(made), json.dumps(to_json(made)), *made.extra.values()):
            text.encode()
        if len(made.rows) != len({row.source_key.key for row in made.rows}):
            found.append(Finding(case, "a key has two rows"))
    except (TranslateError, ConfigError) as error:
        if len(error_text := str(error)) > LETTERS or not error_text.isascii() and _cannot_be_written(error_text):
            found.append(Finding(case, f"a message of {len(error_text)} letters: {error_text[:200]!r}"))
    except (Hang, KeyboardInterrupt):
        raise
    except BaseException as error:
        found.append(Finding(case, f"{type(error).__name__}: {str(error)[:300]}"))


def _cannot_be_written(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def test_damaged_files_are_translated_or_rejected() -> None:
    assert not run(1, 40)


if __name__ == "__main__":
    command(run, cases=1000, seed=1)
