"""The entry point: help, errors and exit codes in process; speed and imports in a separate process."""

import errno
import gc
import json
import subprocess
import sys
import types

import pytest

import octavo
from octavo.cli import arguments
from octavo.cli import main as entry
from octavo.cli.main import main
from octavo.config import load_config_text
from tests.cpu_budget import cpu_seconds

CONFIG = """model: {path: ./m}
data: {train: [{path: a.json}]}
train: {steps: 10}
"""


@pytest.fixture
def run_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return "run.yaml"


def test_overview(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in entry.COMMANDS:
        assert f"\n  {name} " in out
    assert main([]) == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: octavo {name}")
    assert len(out.splitlines()) > 4


@pytest.mark.parametrize(
    "argv, message",
    [
        (["trian", "x"], "octavo: there is no command 'trian'; did you mean `octavo train`?"),
        (["zzz"], "commands are: demo, train, plan"),
        (["run.yaml"], "to run this file: octavo train run.yaml"),
        (["--json"], "there is no option --json before the command"),
        (["train"], "the following arguments are required: FILE.yaml"),
        (["train", "no.yaml"], "octavo train: no.yaml: there is no file no.yaml"),
        (["train", "run.yaml", "train.stpes=1"], "train.stpes: unknown key; did you mean `steps`?"),
        (["train", "train.steps=1", "run.yaml"], "the first argument is the configuration file, found 'train.steps=1'"),
        (["train", "run.yaml", "--fp8-recipe", "blokwise"], "Did you mean 'blockwise'?"),
        (
            ["train", "run.yaml", "--fp8-recipe", "off", "--fp8-param-gather"],
            "override `fp8.param=true`: fp8.param: has no effect where nothing runs in FP8",
        ),
        (
            ["plan", "run.yaml", "fp8.plan=p.json", "fp8.recipe=off"],
            "fp8.plan: a plan file is set, and the recipe is",
        ),
        (["train", "run.yaml", "--fp8-recipe", "mxfp8", "--fp8-format", "hybrid"], "mxfp8 has no hybrid format"),
        (["train", "run.yaml", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (
            ["compare", "run.yaml", "--recipes", "blokwise"],
            "unknown recipe 'blokwise'; did you mean blockwise? recipes are tensorw",
        ),
        (["compare", "run.yaml", "--recipes", "off"], "off is always the reference"),
        (["compare", "run.yaml", "--recipes", " ,"], "--recipes is empty"),
        (["compare", "run.yaml", "--nproc", "2", "--jobs", "2"], "--nproc distributes each run; use only one"),
        (
            ["compare", "run.yaml", "--factorial", "foundtion,image_encoder"],
            "did you mean foundation? choose from image_encoder, image_projector",
        ),
        (["compare", "run.yaml", "--factorial", "foundation"], "--factorial: 1 component(s) named, and a design needs"),
        (["train", "run.yaml", "run.trackers=[wandp]"], "run.trackers"),
        (["compare", "run.yaml", "fp8.format=hybrid", "--recipes", "rowwise,mxfp8"], "mxfp8 has no hybrid format"),
        (["digits", "d", "--train", "0"], "argument --train: expected a whole number of at least 1, found '0'"),
        (["tiny", "llama", "d", "--seed", "9" * 5000], "--seed: expected a whole number below a billion, found '999"),
        (
            ["plan", "x.yaml", "--tokens", "foundation=" + "9" * 5000],
            "below 10**12, e.g. foundation=8192, found 'foun",
        ),
        (["generate", "m", "--prompt", "a\udc80"], "--prompt is not UTF-8"),
        (["generate", "m", "--prompt", "a", "--stop", "a\udc80"], "--stop is not UTF-8"),
        (["tiny", "llama", "d", "--seed", "-1"], "argument --seed: expected a whole number of at least 0, found '-1'"),
    ],
)
def test_wrong_usage(argv, message, capsys, run_yaml):
    assert main(argv) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err and not output.out


def replace_schema_command(monkeypatch, run):
    """Replace the command `octavo schema` by `run`."""
    module = types.SimpleNamespace(__doc__="", add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "octavo.cli.schema", module)


def test_octavo_errors_are_printed_without_traceback(monkeypatch, capsys):
    from octavo.models.errors import ModelError

    def fail(args):
        raise ModelError("there is no model\x1b[2J;\nwrite one")

    replace_schema_command(monkeypatch, fail)
    assert main(["schema"]) == 1
    assert capsys.readouterr().err == "octavo schema: there is no model\\x1b[2J;\nwrite one\n"


def test_operating_system_errors_are_printed_without_traceback(monkeypatch, capsys):
    import torch

    def fail(error):
        def run(args):
            raise error

        return run

    replace_schema_command(monkeypatch, fail(PermissionError(13, "Permission denied", "/runs")))
    assert main(["schema"]) == 1
    assert (
        capsys.readouterr().err == "octavo schema: Permission denied: /runs; choose a folder that you have access to\n"
    )
    replace_schema_command(monkeypatch, fail(OSError(errno.ESTALE, "Stale file handle", "/runs/metrics.jsonl")))
    assert main(["schema"]) == 1
    assert "Stale file handle: /runs/metrics.jsonl; the file system is no longer available" in capsys.readouterr().err
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...")
    replace_schema_command(monkeypatch, fail(full))
    assert main(["schema"]) == 1
    assert capsys.readouterr().err.startswith("octavo schema: CUDA out of memory; lower train.micro_batch")
    for full in (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you ..."
        ),
        MemoryError(),
    ):
        replace_schema_command(monkeypatch, fail(full))
        assert main(["schema"]) == 1
        message = capsys.readouterr().err
        assert message.startswith("octavo schema: host memory is full (") and "; lower train.micro_batch" in message
    lost_peer = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:5"
    )
    replace_schema_command(monkeypatch, fail(lost_peer))
    assert main(["schema"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("octavo schema: another process of this run died") and "run.resume=auto" in message
    replace_schema_command(
        monkeypatch, fail(RuntimeError("[gloo/transport/tcp/pair.cc] op.preamble.length <= op.nbytes. 8 vs 4"))
    )
    with pytest.raises(RuntimeError, match="preamble"):  # ranks that disagree are a bug
        main(["schema"])
    replace_schema_command(monkeypatch, fail(FileNotFoundError(2, "No such file", "x")))
    with pytest.raises(FileNotFoundError):
        main(["schema"])


def test_dead_data_worker_is_printed_without_traceback(monkeypatch, capsys):
    from octavo.data.errors import WorkerDied

    def fail(args):
        raise WorkerDied("data worker 0 (pid 7, killed by signal 9) died")

    replace_schema_command(monkeypatch, fail)
    assert main(["schema"]) == 1
    assert capsys.readouterr().err == "octavo schema: data worker 0 (pid 7, killed by signal 9) died\n"


def test_both_modules_run_the_command():
    for module in ("octavo", "octavo.cli.main"):
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("octavo "), module


def test_unexpected_errors_keep_their_traceback(monkeypatch):
    def fail(args):
        raise ZeroDivisionError("a defect")

    replace_schema_command(monkeypatch, fail)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        main(["schema"])


def test_interrupted(monkeypatch, capsys):
    def fail(args):
        raise KeyboardInterrupt

    replace_schema_command(monkeypatch, fail)
    assert main(["schema"]) == 130
    assert capsys.readouterr().err == "octavo: interrupted\n"


def test_schema_prints_the_schema(capsys):
    from octavo.config import schema_text

    assert main(["schema"]) == 0
    assert capsys.readouterr().out == schema_text()


def test_closed_pipe_is_not_an_error():
    done = subprocess.run(
        f"{sys.executable} -m octavo schema | head -1", shell=True, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{\n" and not done.stderr


HEAVY = ("torch", "transformers", "numpy", "matplotlib", "sklearn")


def command_cpu_seconds(argv, cwd, code):
    """Measure the CPU seconds of a command, the best of up to five; they hardly depend on the load of the machine."""
    script = (
        "import sys; from octavo.cli.main import main; code = main(sys.argv[1:]);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    best = float("inf")
    for _ in range(5):
        before = cpu_seconds()
        done = subprocess.run([sys.executable, "-c", script, *argv], cwd=cwd, capture_output=True, text=True)
        best = min(best, cpu_seconds() - before)
        assert done.returncode == code, done.stderr
        assert done.stderr.endswith("[]\n"), done.stderr
        if best < 1:
            break
    return best


def test_help_and_config_errors_take_a_second_without_torch(tmp_path):
    (tmp_path / "bad.yaml").write_text(CONFIG + "fp8: {recpie: off}\n")
    assert command_cpu_seconds(["--help"], tmp_path, 0) < 1
    for name in ("train", "plan", "compare"):
        assert command_cpu_seconds([name, "--help"], tmp_path, 0) < 1
        assert command_cpu_seconds([name, "bad.yaml"], tmp_path, 2) < 1
    (tmp_path / "missing.yaml").write_text(CONFIG)
    assert command_cpu_seconds(["train", "missing.yaml"], tmp_path, 2) < 1  # its model and data are missing
    assert command_cpu_seconds(["report", "nowhere"], tmp_path, 2) < 1


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(entry.COMMANDS) - {"train", "plan", "compare"}))
def test_help_of_other_commands_takes_a_second_without_torch(name, tmp_path):
    assert command_cpu_seconds([name, "--help"], tmp_path, 0) < 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write tiny/ (a mini Qwen3-VL), its run.yaml and one training row."""
    from octavo.models.tiny import tiny

    home = tmp_path_factory.mktemp("slow")
    tiny.write("qwen3_vl", home / "tiny", size="mini")
    turns = [{"role": role, "content": "hello"} for role in ("user", "assistant")]
    (home / "a.json").write_text(json.dumps([{"messages": turns}]))
    (home / "run.yaml").write_text(CONFIG.replace("./m", "tiny"))
    return home


@pytest.mark.parametrize("first", [True, False])
def test_objects_of_the_first_import_are_frozen(first, monkeypatch):
    """If torch was imported before, objects are not frozen, because they may be the caller's."""
    frozen = []
    monkeypatch.setattr(arguments.gc, "freeze", lambda: frozen.append(gc.isenabled()))
    if first:
        monkeypatch.delitem(sys.modules, "torch")
    with arguments.importing():
        assert not gc.isenabled()
    assert gc.isenabled() and frozen == [False] * first


def run_cpu_seconds(words, folder):
    """Measure the CPU seconds of another interpreter and its children."""
    before = cpu_seconds()
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return cpu_seconds() - before


@pytest.fixture(scope="module")
def torch_import_seconds(model):
    """Measure the CPU seconds of importing torch, the better of two."""
    return min(run_cpu_seconds(["-c", "import torch"], model) for _ in range(2))


@pytest.mark.long
@pytest.mark.parametrize(
    "argv",
    [
        ["doctor"],
        ["plan", "run.yaml", "--card", "8GB"],  # includes the work without --card
        ["generate", "tiny", "--prompt", "hello"],
    ],
    ids=" ".join,
)
def test_commands_take_a_few_times_as_long_as_importing_torch(argv, model, torch_import_seconds):
    """The limit is relative to the import of torch, which a busy machine slows equally. Transformers' import takes 3
    times as long; doctor imports torch twice, and a plan for a card counts six forwards without values."""
    limit = (5 if argv[0] == "generate" else 7) * torch_import_seconds
    assert any(run_cpu_seconds(["-m", "octavo", *argv], model) < limit for _ in range(3))


@pytest.mark.parametrize("command", ["train", "compare", "plan"])
def test_missing_files_of_a_configuration_are_listed(command, tmp_path, monkeypatch, capsys):
    """All are listed, relative to the file, with a hint if the path exists relative to the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for folder in ("Qwen3-VL-8B-Instruct", "pictures"):
        (tmp_path / folder).mkdir()
    file = tmp_path / "configs" / "run.yaml"
    file.write_text(
        "model: {path: Qwen3-VL-8B-Instruct}\ntrain: {steps: 1}\n"
        "data: {train: [{path: rows.json, images: pictures}], eval: [{path: held.json}]}\n"
    )
    assert main([command, "configs/run.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and lines[1] == f"data.train.0.path: there is no file {tmp_path}/configs/rows.json"
    assert lines[2].endswith(f"from there {tmp_path}/pictures is ../pictures)") and "held.json" in lines[3]
    assert "from there" in lines[0] and ("--shape qwen3_vl_8b" in lines[0]) == (command == "plan")
    assert main([command, "configs/run.yaml", "model.path=Qwen3-VL-8B-Instruct", "data.eval=[]"]) == 2
    output = capsys.readouterr().err
    assert "is not a model folder: it has no config.json" in output.splitlines()[0]
    assert "data.train.0.path: there is no file" in output


def test_missing_tracker_package_is_reported(run_yaml, monkeypatch, capsys):
    monkeypatch.setattr("octavo.base.environment.version", lambda name: "1" if name == "wandb" else None)
    assert main(["train", run_yaml, "run.trackers=[wandb, swanlab]"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("octavo train: model.path") and lines[-1].endswith(
        "pip install swanlab, or leave it out"
    )


def test_shape_is_guessed_from_the_folder_name():
    from octavo.cli.plan import SHAPES, shape_of
    from octavo.models.structure import shapes

    assert set(SHAPES) == set(shapes.SHAPES)
    names = {
        "/models/Qwen3-VL-8B-Instruct": "qwen3_vl_8b", "models--meta-llama--Llama-2-7b-hf/snapshots/0a1": "llama2_7b",
        "Qwen2.5-VL-7B-Instruct": "qwen2_5_vl_7b", "InternVL3_5-8B-HF": "internvl3_5_8b", "Qwen3-8B": "qwen3_8b",
        "Qwen3-VL-30B-A3B": "qwen3_vl_30b_a3b", "my-model": None,
        "LLaVA-OneVision-1.5-4B-Instruct": "llava_onevision_1_5_4b", "/data/qwen3_8b/run/a/b/model": None,
    }  # fmt: skip
    assert {path: shape_of(path) for path in names} == names


def test_folder_of_a_run_as_model_names_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("with/hf", "with/checkpoints/step_4", "lora/adapter", "bare"):
        (tmp_path / folder).mkdir(parents=True)
    for file in (
        "with/hf/config.json",
        "with/config.yaml",
        "lora/config.yaml",
        "lora/adapter/adapter_config.json",
        "bare/config.yaml",
    ):
        (tmp_path / file).write_text("{}")
    for path, words in {
        "with": "it is a run directory, whose model is with/hf",
        "with/checkpoints/step_4": "it belongs to the run",
        "lora": "with LoRA; merge its adapter first: octavo merge lora MERGED",
        "lora/adapter": "it is an adapter; set model.path to its base and lora.adapter to this folder",
        "bare": "without hf/; export its model first: octavo export bare MODEL --format bf16",
    }.items():
        cfg = load_config_text(CONFIG.replace("./m", path))
        (first, *_) = arguments.missing_files(cfg, None)
        assert f"{path} is not a model folder: " in first and words in first.replace(f"{tmp_path}/", ""), first
