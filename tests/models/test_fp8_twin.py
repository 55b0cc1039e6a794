"""`model.fp8_twin`: published FP8 weights of another owner, with a double of the hub that the real client asks."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from octavo import models, train
from octavo.base import hub
from octavo.cli.main import main
from octavo.config import ConfigError, load_config_text
from octavo.models.structure.fp8_twin import describe_twin, resolve_twin
from octavo.models.tiny import tiny
from octavo.train.artifacts import export_model


class Double:
    """A hub on this machine. ``repositories``: ORG/NAME -> folder; ``branches``: (ORG/NAME, revision) -> folder.

    ``fetched`` has the names of the files whose content was sent, a weight file only if it was sent as a whole.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.branches: dict[tuple[str, str], Path] = {}
        self.fetched: list[str] = []

    def sha(self, folder: Path) -> str:
        return hashlib.sha1(str(folder).encode()).hexdigest()

    def find(self, name: str, revision: str) -> Path | None:
        folder = self.repositories.get(name)
        if folder is None or revision in ("main", self.sha(folder)):
            return folder
        known = [one for (repo, branch), one in self.branches.items()
                 if repo == name and revision in (branch, self.sha(one))]  # fmt: skip
        return known[0] if known else None


class Handler(BaseHTTPRequestHandler):
    double: Double

    def log_message(self, *args):  # no lines on stderr
        pass

    def reply(self, code: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/").split("/")
        api = path[:2] == ["api", "models"]
        owner, name, verb, *rest = [*(path[2:] if api else path), "revision"][:3] + path[5 if api else 3 :]
        repo, revision = f"{owner}/{name}", rest[0] if rest else "main"
        if repo not in self.double.repositories:
            return self.reply(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        folder = self.double.find(repo, revision)
        if folder is None:
            return self.reply(404, b"{}", X_Error_Code="RevisionNotFound", X_Error_Message="Revision not found")
        files = {file.name: file for file in sorted(folder.iterdir())}
        if verb == "tree":
            listed = [{"type": "file", "path": n, "size": f.stat().st_size, "oid": "0" * 40} for n, f in files.items()]
            return self.reply(200, json.dumps(listed).encode())
        if api:
            about = {"id": repo, "sha": self.double.sha(folder), "siblings": [{"rfilename": name} for name in files]}
            return self.reply(200, json.dumps(about).encode())
        if rest[1] not in files:
            return self.reply(404, b"", X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        content = files[rest[1]].read_bytes()
        facts = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X_Repo_Commit": self.double.sha(folder)}
        if "Range" in self.headers:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            return self.reply(206, part, Content_Range=f"bytes {first}-/{len(content)}", **facts)
        if self.command == "GET":
            self.double.fetched.append(f"{repo}/{rest[1]}")
        return self.reply(200, content, **facts)

    do_HEAD = do_GET


@pytest.fixture
def double(tmp_path, monkeypatch):
    """A hub with no repositories, and an empty cache."""
    double = Double()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"double": double}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    for name, value in {
        "ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ASSETS_CACHE": str(tmp_path / "assets"),
        "HF_HUB_DISABLE_XET": True,
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    huggingface_hub.close_session()  # sessions keep the setting of offline mode
    yield double
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folders(fp8_exports, tmp_path_factory):
    """A copy of the exports, with a file that is not downloaded; tests add folders that differ in one thing each."""
    folder = shutil.copytree(fp8_exports, tmp_path_factory.mktemp("models") / "exports")
    for name in ("plain", "block", "dynamic"):
        (folder / name / "README.md").write_text("not downloaded")
    return folder


def changed(folders: Path, tmp_path: Path, change) -> Path:
    """A copy of the folder with blocks, with change(folder) applied."""
    copy = tmp_path / "changed"
    shutil.copytree(folders / "block", copy)
    change(copy)
    return copy


def set_config(**values):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def change_weights(edit):
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def other_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"].get("merges", [])[:-1]
    content["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def config(folders: Path, tmp_path: Path, *over: str, path: str = "an/Original", twin: str = "other/Original-FP8"):
    text = f"""
model: {{path: {path}, load_in_fp8: blockwise, fp8_twin: {twin}}}
lora: {{rank: 2}}
data: {{train: [{{path: {folders / "rows.json"}}}]}}
train: {{steps: 1, seq_length: 64, micro_batch: 1, global_batch: 1}}
run: {{dir: {tmp_path / "run"}, health_every: 0, tensorboard: false, hf: false, threads: 1}}
"""
    return load_config_text(text, over)


def test_twin_is_compared_downloaded_used_and_recorded(folders, double, tmp_path, capsys):
    double.repositories = {"an/Original": folders / "plain", "other/Original-FP8": folders / "block"}
    base, twin = (double.sha(folders / name) for name in ("plain", "block"))
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: an/Original, load_in_fp8: blockwise, fp8_twin: other/Original-FP8}}\nlora: {{rank: 2}}\n"
        f"data: {{train: [{{path: {folders}/rows.json}}]}}\n"
        "train: {steps: 1, seq_length: 64, micro_batch: 1, global_batch: 1}\n"
    )
    assert main(["plan", str(file)]) == 0
    printed = capsys.readouterr()
    line = f"model.fp8_twin: other/Original-FP8 at {twin[:12]} (fp8 block 128x128) replaces the weights of an/Original"
    assert line in printed.err + printed.out
    assert "other/Original-FP8/model.safetensors" in double.fetched
    assert "an/Original/model.safetensors" not in double.fetched, "only the headers of the replaced weights are needed"
    cfg = config(folders, tmp_path)
    result = train.run(cfg)
    about = json.loads((result.dir / "environment.json").read_text())
    assert about["model"] == {"name": "other/Original-FP8", "revision": twin}
    assert about["fp8_twin"] == {
        "name": "other/Original-FP8", "revision": twin, "format": "fp8 block 128x128", "of": f"an/Original@{base}",
    }  # fmt: skip
    # The same codes from a folder give the same losses, and config.yaml of the run repeats them without the hub.
    local = config(folders, tmp_path, f"run.dir={tmp_path}/b", path=str(folders / "block"), twin="null")
    double.repositories.clear()
    again = load_config_text((result.dir / "config.yaml").read_text(), [f"run.dir={tmp_path}/c"])
    assert result.losses() == train.run(local).losses() == train.run(again).losses()


def test_second_start_works_offline(folders, double, tmp_path, monkeypatch):
    double.repositories = {"an/Original": folders / "plain", "other/Original-FP8": folders / "block"}
    said: list[str] = []
    first = resolve_twin(config(folders, tmp_path), said.append)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert resolve_twin(config(folders, tmp_path), said.append) == first
    assert sum("the hub does not answer" in line for line in said) == 2
    blobs = list((tmp_path / "hub").glob("models--other*/blobs/*"))
    max(blobs, key=lambda blob: blob.stat().st_size).unlink()  # a download that was not finished
    with pytest.raises((hub.HubError, models.ModelError), match="FP8 could not be fetched|model.safetensors"):
        resolve_twin(config(folders, tmp_path), said.append)


def test_folders_can_be_twins(folders, tmp_path):
    said: list[str] = []
    cfg = config(folders, tmp_path, path=str(folders / "plain"), twin=str(folders / "block"))
    resolved = resolve_twin(cfg, said.append)
    assert resolved.model.path == str(folders / "block") and "tokenizer and configuration agree" in said[0]
    assert describe_twin(resolved) == {
        "name": str(folders / "block"), "revision": "", "format": "fp8 block 128x128", "of": str(folders / "plain"),
    }  # fmt: skip
    assert resolve_twin(resolved, said.append) is resolved and describe_twin(cfg) is None


@pytest.mark.parametrize(
    ("path", "name", "of", "message"),
    [
        (
            "plain",
            "block",
            "x",
            r"of is x, but model.path \S+/plain is not the folder of the twin \S+/block: .* remove",
        ),
        ("plain", "plain", "plain", r"of is \S+/plain, but the twin \S+/plain is not in FP8: Octavo writes `of` to"),
        (
            "block",
            "other/Original-FP8",
            "an/Original",
            r"of is an/Original, but model.path \S+/block is not the folder",
        ),
        ("block", "block", "an/Original", r"of is an/Original, which is neither ORG/NAME@COMMIT nor a folder: Octavo"),
        ("block", "block", "another", r"\S+/block is not a copy of \S+/another; "),
    ],
)
def test_typed_record_is_refused(folders, tmp_path, path, name, of, message):
    """`of` is written by Octavo; typed, it would skip the comparison and be recorded as its result."""
    if of == "another":
        set_config(vocab_size=3)(Path(shutil.copytree(folders / "plain", tmp_path / "another")))
        of = str(tmp_path / "another")
    name, of = (str(folders / one) if (folders / one).is_dir() else one for one in (name, of))
    cfg = config(folders, tmp_path, f"model.fp8_twin={{name: {name}, of: {of}}}", path=str(folders / path))
    with pytest.raises(models.ModelError, match=message):
        resolve_twin(cfg, print)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("3", "model.fp8_twin: expected ORG/NAME, ORG/NAME@REVISION or a folder, found 3"),
        ("[a]", r"model.fp8_twin: expected ORG/NAME, ORG/NAME@REVISION or a folder, found \['a'\]"),
        ("other/X-FP8@", "or a folder, found 'other/X-FP8@' with an empty revision; remove the @ for the newest"),
        ("{name: other/X-FP8@}", "model.fp8_twin.name: expected ORG/NAME, ORG/NAME@REVISION or a folder, found 'o"),
    ],
)
def test_other_forms_are_refused_with_the_right_one(folders, tmp_path, value, message):
    with pytest.raises(ConfigError, match=message):
        config(folders, tmp_path, twin=f"'{value}'" if value.endswith("@") else value)


def test_revision_of_twin_is_used(folders, double, tmp_path):
    double.repositories = {"an/Original": folders / "plain", "other/Original-FP8": folders / "dynamic"}
    double.branches = {("other/Original-FP8", "blocks"): folders / "block"}
    resolved = resolve_twin(config(folders, tmp_path, twin="other/Original-FP8@blocks"), print)
    assert resolved.model.fp8_twin.name == f"other/Original-FP8@{double.sha(folders / 'block')}"
    with pytest.raises(models.ModelError, match=r"has rowwise codes .*, and model.load_in_fp8 is blockwise. Set load_"):
        resolve_twin(config(folders, tmp_path), print)
    for twin, message in (
        ("other/Original-FP8@v9", "there is no model other/Original-FP8 at the revision 'v9' on the Hugging Face hub"),
        ("other/Orignal-FP8", "there is no model other/Orignal-FP8 on the Hugging Face hub"),
    ):
        with pytest.raises(hub.HubError, match=message):
            resolve_twin(config(folders, tmp_path, twin=twin), print)
    assert not any(file.endswith("dynamic/model.safetensors") for file in double.fetched)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_config(rms_norm_eps=0.5), ["config.json: rms_norm_eps is 0.5 and not 1e-06"]),
        (set_config(rope_theta=12345.0, rope_parameters=None), ["rope_theta is 12345.0 and not"]),
        (other_tokenizer, ["1 thing differs", "tokenizer: the content of tokenizer.json differs (SHA-256 "]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer: tokenizer.json is missing"]),
        (change_weights(lambda w: w.pop("model.norm.weight")), ["1 of ", "are missing, first model.norm.weight"]),
        (change_weights(lambda w: w.update(extra=torch.ones(2))), ["1 tensor not in the model, first extra"]),
        (change_weights(lambda w: w.update({"model.norm.weight": torch.ones(3)})),
         ["1 tensor of another shape, first model.norm.weight: [3] and not ["]),
        (change_weights(lambda w: w.update({k: v.bfloat16() for k, v in w.items() if v.itemsize == 1})),
         ["no tensor has FP8 codes (F8_E4M3), although config.json announces them"]),
    ],
)  # fmt: skip
def test_disagreements_are_named_before_weights_are_fetched(folders, double, tmp_path, change, words):
    double.repositories = {
        "an/Original": folders / "plain", "other/Original-FP8": changed(folders, tmp_path, change),
    }  # fmt: skip
    with pytest.raises(models.ModelError) as error:
        resolve_twin(config(folders, tmp_path), print)
    message = str(error.value)
    assert message.startswith("model.fp8_twin: other/Original-FP8 is not a copy of an/Original; ")
    assert all(word in message for word in words), message
    assert not any(file.endswith(".safetensors") for file in double.fetched)


def test_twin_of_another_size_is_refused(folders, double, tmp_path):
    tiny.write("qwen3", tmp_path / "small")
    export_model(tmp_path / "small", tmp_path / "small8", "fp8-dynamic")
    double.repositories = {"an/Original": folders / "plain", "other/Original-FP8": tmp_path / "small8"}
    with pytest.raises(models.ModelError, match=r"(?s)config.json: hidden_size is .* tensors of another shape"):
        resolve_twin(config(folders, tmp_path, "model.load_in_fp8=rowwise"), print)


def test_harmless_differences_are_accepted_and_inputs_noted(folders, double, tmp_path):
    def change(folder: Path) -> None:
        set_config(transformers_version="4.1", unsloth_fixed=True, pad_token_id=1, use_cache=False, dtype="float16")(
            folder
        )
        content = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(content | {"padding": None, "truncation": None}, indent=7))
        (folder / "chat_template.jinja").write_text("{{ messages }}")

    double.repositories = {"an/Original": folders / "plain", "other/Original-FP8": changed(folders, tmp_path, change)}
    said: list[str] = []
    resolve_twin(config(folders, tmp_path), said.append)
    assert said[0] == "note: other/Original-FP8 has a different chat template from an/Original; the twin's is used"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (None, "is not in FP8: its config.json has no quantization_config"),
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
    ],
)
def test_other_formats_are_refused(folders, tmp_path, section, message):
    twin = changed(folders, tmp_path, set_config(quantization_config=section))
    with pytest.raises(models.ModelError, match=message):
        resolve_twin(config(folders, tmp_path, path=str(folders / "plain"), twin=str(twin)), print)


def test_missing_and_unfinished_folders_are_refused(folders, tmp_path):
    def resolve(twin: object) -> None:
        resolve_twin(config(folders, tmp_path, path=str(folders / "plain"), twin=str(twin)), print)

    with pytest.raises(models.ModelError, match="model.fp8_twin: there is no folder .*none, and it is not a name"):
        resolve(tmp_path / "none")
    twin = changed(folders, tmp_path, lambda folder: None)
    file = twin / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(models.ModelError, match="model.safetensors is damaged or truncated"):
        resolve(twin)
    file.unlink()
    with pytest.raises(models.ModelError, match="contains no model.safetensors"):
        resolve(twin)


def test_hub_out_of_reach_is_reported(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(hub.HubError, match="model.fp8_twin: there is no folder other/Original-FP8 here, and the Huggi"):
        resolve_twin(config(folders, tmp_path, path=str(folders / "plain")), print)


def test_twin_needs_a_kind(folders, tmp_path):
    with pytest.raises(ConfigError, match=r"model.fp8_twin: names codes for the frozen base, and load_in_fp8 does not"):
        config(folders, tmp_path, "model.load_in_fp8=null")
    # `octavo compare` trains the same weights without FP8: of a twin that was compared before, the key is a record.
    record = "model.fp8_twin={name: other/Original-FP8, of: an/Original}"
    assert config(folders, tmp_path, "model.load_in_fp8=null", record).model.fp8_twin.of == "an/Original"


def test_plan_reports_a_wrong_twin(folders, double, tmp_path, capsys):
    double.repositories = {"an/Qwen3-8B": folders / "plain"}
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: an/Qwen3-8B, load_in_fp8: blockwise, fp8_twin: other/Misspelled}}\nlora: {{rank: 2}}\n"
        f"data: {{train: [{{path: {folders}/rows.json}}]}}\ntrain: {{steps: 1}}\n"
    )
    for command in ("plan", "train"):
        assert main([command, str(file)]) == 2
        said = capsys.readouterr().err
        assert "model.fp8_twin: there is no model other/Misspelled on the Hugging Face hub" in said
        assert "--shape" not in said


def test_fetched_model_is_found_offline(folders, double, tmp_path, monkeypatch):
    """Without `model.fp8_twin`, too: the name of the revision is kept with the download."""
    double.repositories = {"an/Original": folders / "plain"}
    double.branches = {("an/Original", "v1"): folders / "block"}
    for revision, folder in ((None, "plain"), ("v1", "block")):
        path = hub.model_folder("an/Original", revision, None, print)
        with monkeypatch.context() as offline:
            offline.setattr(constants, "HF_HUB_OFFLINE", True)
            huggingface_hub.close_session()
            assert hub.model_folder("an/Original", revision, None, print) == path
        huggingface_hub.close_session()
        assert path.name == double.sha(folders / folder)
