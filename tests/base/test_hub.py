"""Names of the Hugging Face hub in place of folders, with a prepared cache and no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from huggingface_hub import errors

import octavo
from octavo import data, train
from octavo.base import hub
from octavo.config import ConfigError, load_config_text

SHA = "0123456789abcdef" * 2 + "01234567"


def put(cache: Path, name: str, source: Path) -> Path:
    """A model folder as the hub's cache has it: links into blobs, a snapshot under its SHA, `main` that names it."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / SHA
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(SHA)
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, repo / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(os.path.relpath(repo / "blobs" / f"{number:064x}", snapshot))
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, which itself is out of reach."""

    waited = []

    def refuse(self, name, **asked):
        waited.append(asked["timeout"])
        assert waited == [hub.TIMEOUT_S], "who does not answer is asked once"
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    return tmp_path / "hub"


@pytest.fixture
def online(monkeypatch):
    """online({name: sha or error}): what the hub says of repositories."""

    def answer(known):
        def repo_info(self, name, repo_type=None, revision=None, timeout=None):
            found = known.get(name)
            if found is None:
                response = SimpleNamespace(headers={}, request=None, status_code=404)
                raise errors.RepositoryNotFoundError("404 Client Error", response=response)
            return SimpleNamespace(sha=found)

        monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)

    return answer


def config(fp8_exports: Path, tmp_path: Path, *over: str, path: str = "an/Original"):
    text = f"""
model: {{path: {path}}}
data: {{train: [{{path: {fp8_exports / "rows.json"}}}]}}
train: {{steps: 1, seq_length: 64, micro_batch: 1, global_batch: 1}}
run: {{dir: {tmp_path / "run"}, health_every: 0, tensorboard: false, hf: false, threads: 1}}
"""
    return load_config_text(text, over)


BLOCK = ("lora={rank: 2}", "model.load_in_fp8=block")


@pytest.mark.parametrize(
    ("there", "over", "took", "words"),
    [
        ({"an/Original": "plain", "an/Original-FP8": "block"}, BLOCK, "an/Original-FP8", "its published FP8 twin"),
        ({"an/Original": "plain", "an/Original-FP8": "dynamic"}, BLOCK, "an/Original",
         "note: an/Original-FP8 is not taken: its codes are rowwise"),
        ({"an/Original": "plain", "an/Original-FP8": "block", "an/Original-FP8-dynamic": "dynamic"},
         ("lora={rank: 2}", "model.load_in_fp8=true"), "an/Original-FP8-dynamic", "twin (rowwise, load_in_fp8)"),
        ({"an/Original": "plain", "an/Original-FP8": "block"}, (), "an/Original", "the hub does not answer (Conn"),
        ({"an/Original": "plain", "an/Original-FP8": "block"}, (*BLOCK, "model.revision=main"), "an/Original", "cache"),
    ],
)  # fmt: skip
def test_resolved_model_trains_and_is_recorded(fp8_exports, cache, tmp_path, there, over, took, words):
    for name, folder in there.items():
        put(cache, name, fp8_exports / folder)
    said: list[str] = []
    cfg = hub.resolve_names(config(fp8_exports, tmp_path, *over), said.append)
    assert any(words in line for line in said) and said[-1].startswith(f"model.path an/Original: {took} at {SHA[:12]}")
    assert Path(cfg.model.path).parent.name == "snapshots" and hub.resolve_names(cfg, None) is cfg  # type: ignore[arg-type]
    result = train.run(cfg)
    about = json.loads((result.dir / "environment.json").read_text())
    assert about["model"] == {"name": took, "revision": SHA}
    if "taken: its codes" in words or "FP8" in took:
        assert "frozen FP8 codes" in (result.dir / "plan.json").read_text()


def test_load_accepts_hub_names(fp8_exports, cache):
    put(cache, "an/Original", fp8_exports / "plain")
    said: list[str] = []
    assert octavo.load("an/Original", log=said.append).config.model_type == "qwen3" and "is taken" in said[-1]


def test_newest_revision_is_fetched_without_code(fp8_exports, cache, tmp_path, online, monkeypatch):
    asked = {}

    def snapshot_download(name, repo_type, revision, allow_patterns):
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return put(cache, name, fp8_exports / "plain")

    online({"an/Original": SHA})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    said: list[str] = []
    cfg = hub.resolve_names(config(fp8_exports, tmp_path, *BLOCK), said.append)
    assert (asked["name"], asked["revision"]) == ("an/Original", SHA)
    assert "*.safetensors" in asked["patterns"] and not any(p in asked["patterns"] for p in ("*", "*.py", "*.bin"))
    assert said == [f"model.path an/Original: an/Original at {SHA[:12]} is taken; no published FP8 twin of the kind "
                    "blockwise was found (suffixes -FP8, -FP8-block, -FP8-Block, -FP8-BLOCK), so it is quantized here. "
                    "Other owners name it with the same suffixes (RedHatAI/Original-FP8, unsloth/Original-FP8, ...): "
                    "model.fp8_twin: ORG/NAME compares and uses one"]  # fmt: skip
    assert hub.origin(cfg.model.path) == {"name": "an/Original", "revision": SHA} and hub.origin(tmp_path) is None
    with pytest.raises(hub.HubError, match="there is no model no/Such at the revision 'v2' on the Hugging Face hub"):
        hub.resolve_names(config(fp8_exports, tmp_path, "model.revision=v2", path="no/Such"), said.append)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, "block"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, None),
        ({"quant_method": "fp8"}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, None),
        ({"quant_method": "gptq"}, None),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}, "row"),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}}, None),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}}}, "tensor"),
        ({"config_groups": {"a": {}}}, None),
        ("fp8", None),
    ],
)
def test_declared_kind(tmp_path, said, kind):
    for form in ({"quantization_config": said}, {"text_config": {"quantization_config": said}}):
        (tmp_path / "config.json").write_text(json.dumps(form))
        assert hub.declared_kind(tmp_path / "config.json") == kind
    (tmp_path / "config.json").write_text("[1]")
    assert hub.declared_kind(tmp_path / "config.json") is None is hub.declared_kind(tmp_path / "none.json")


def test_is_name_distinguishes_names_and_paths(tmp_path, fp8_exports, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    for path in (
        "./an/Original",
        "/an/Original",
        "an/Original/x",
        "here/model",
        "here/other",
        "Original",
        "an/rows.json",
    ):
        assert Path(config(fp8_exports, tmp_path, f"model.path={path}").model.path).is_absolute(), path
    assert config(fp8_exports, tmp_path, "model.path=an/Original").model.path == "an/Original"
    with pytest.raises(ConfigError, match="model.revision: has no effect on a local path"):
        config(fp8_exports, tmp_path, "model.path=./m", "model.revision=main")
    with pytest.raises(ConfigError, match=r"data.train.0.split: has no effect on a local path"):
        config(fp8_exports, tmp_path, "data.train.0.split=test")


def test_missing_network_is_reported_before_torch_is_imported(fp8_exports, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: Qwen/Qwen3-8B}}\ndata: {{train: [{{path: {fp8_exports}/rows.json}}]}}\n"
                    "train: {steps: 1}\n")  # fmt: skip
    commands = ("train", "plan", "compare")
    code = ("import sys; from octavo.cli.main import main; codes = {main([c, sys.argv[-1]]) for c in sys.argv[1:-1]}; "
            "assert 'torch' not in sys.modules; sys.exit(codes.pop() if len(codes) == 1 else 9)")  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run([sys.executable, "-c", code, *commands, str(file)], capture_output=True, text=True, env=env)
    assert done.returncode == 2, done.stderr
    for command, line in zip(commands, done.stderr.splitlines(), strict=True):
        assert "there is no folder Qwen/Qwen3-8B here, and the Hugging Face hub cannot be asked for the model" in line
        assert "OfflineModeIsEnabled" in line and "hf download Qwen/Qwen3-8B" in line
        assert ("--shape qwen3_8b" in line) == (command == "plan")


def test_hub_data_set_is_pinned(fp8_exports, cache, tmp_path, online, monkeypatch):
    """At the revision that it has now, which the run writes down; as the same rows in a file."""
    rows, asked = json.loads((fp8_exports / "rows.json").read_text()), []

    def load_dataset(name, subset, split, revision):
        asked.append((name, subset, split, revision))
        if split == "none":
            raise ValueError('Unknown split "none"')
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    plain = str(fp8_exports / "plain")
    local = config(fp8_exports, tmp_path, path=plain)
    named = config(fp8_exports, tmp_path, "data.train=[{path: an/Set}]", f"run.dir={tmp_path / 'b'}", path=plain)
    with pytest.raises(hub.HubError, match="cannot be asked for the data set an/Set .*give the `revision`"):
        train.run(named)
    online({"an/Set": SHA})
    assert train.run(named).losses() == train.run(local).losses()
    assert {*asked} == {("an/Set", None, "train", SHA)} and f"revision: {SHA}" in (
        tmp_path / "b/config.yaml"
    ).read_text()
    wrong = named.data.train[0].model_copy(update={"split": "none", "revision": SHA})
    with pytest.raises(
        data.DataError,
        match=r"an/Set, split none, revision 0123\w*, could not be loaded from the Hugging Face hub "
        r'.*Unknown split "none"',
    ):
        data.read(wrong)


def test_hub_data_set_is_streamed(fp8_exports, cache, tmp_path, online, monkeypatch):
    """Row groups of its parquet files, wherever they are opened: rows, losses and joined documents of a local file."""
    online({"an/Set": SHA})
    rows = [{"text": f"{n} and so on"} for n in range(30)]
    files = [tmp_path / f"{n}.parquet" for n in range(3)]
    for n, file in enumerate(files):
        parquet.write_table(pa.Table.from_pylist(rows[10 * n : 10 * n + 10]), file, row_group_size=4)
    opened = []

    class Elsewhere:
        def open(self, file, mode):
            opened.append(file)
            return open(file.removeprefix("hf://"), mode)

    def builder(name, subset, revision):
        assert (name, revision) == ("an/Set", SHA)
        kinds = {"train": [f"hf://{file}" for file in files], "text": ["hf://x.jsonl"]}
        return SimpleNamespace(config=SimpleNamespace(data_files=kinds))

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Elsewhere)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for join in ("true", "false"):
        of = ("train.phase=pretrain", f"data.join={join}", "train.steps=3", "train.seq_length=32")
        losses = []
        for number, entry in enumerate((f"path: {tmp_path}/rows.json", "path: an/Set, stream: true")):
            over = (f"data.train=[{{{entry}}}]", f"run.dir={tmp_path}/{join}{number}")
            named = config(fp8_exports, tmp_path, *of, *over, path=str(fp8_exports / "plain"))
            losses.append(train.run(named).losses())
        assert losses[0] == losses[1]
    assert len({*opened}) == 3 and len(opened) == 3
    entry = hub.resolve_names(named, print).data.train[0]
    for split, message in (
        ("none", "split none, .* could not be loaded from the Hugging Face hub"),
        ("text", "streamed: .*x.jsonl is not a parquet file"),
    ):
        with pytest.raises(data.DataError, match=message):
            data.read(entry.model_copy(update={"split": split}))


def test_published_names_are_covered():
    """FP8 repositories that public texts name, each with its model (where the text does not name it, the name without
    the suffix, of the original owner). Of 90, 17 have the model's owner and are found without a key, 66 follow the
    patterns for other owners, 5 have a known suffix and an owner that is not in the list (3 of NVIDIA's, in a format
    that Octavo does not read), and 2 have names of their own."""
    tables = json.loads((Path(__file__).parent / "published_fp8_names.json").read_text())
    pairs = [tuple(pair) for table in tables.values() for pair in table]
    own = [(m, t) for m, t in pairs if t in {m + end for ends in hub.FP8_SUFFIXES.values() for end in ends}]
    others = [(m, t) for m, t in pairs if t in {n for kind in hub.FP8_SUFFIXES for n in hub.twin_names(m, kind)}]
    rest = {twin for _, twin in {*pairs} - {*own} - {*others}}
    assert (len(pairs), len(own), len(others), len(rest)) == (90, 17, 66, 7), rest
