"""The doctor: a healthy machine passes, and each problem is named with its cause and fix."""

import json
import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from octavo import doctor, fp8
from octavo.base import environment
from octavo.base.recipe_specs import fastest_on
from octavo.cli import doctor as doctor_command
from octavo.cli.main import main
from octavo.doctor import fp8_backends, machine, other_gpus, packages
from octavo.doctor.report import ABSENT, FAIL, OK, WARN, Check, Report
from octavo.fp8 import kernels, metrics
from octavo.fp8.kernels import registry
from octavo.fp8.measuring import bench

GIB = 2**30


def import_checks(requested):
    with packages.SharedImports(requested) as imports:
        return imports.checks(requested)


def single(checks):
    assert len(checks) == 1, checks
    return checks[0]


def test_reference_is_sound_in_every_recipe():
    checks = fp8_backends.backends(("cpu",))
    assert {check.status for check in checks} <= {OK, ABSENT}
    sound = {check.name for check in checks if check.status == OK}
    assert {f"reference {name} on cpu" for name in fp8.RECIPES} | {"reference on cpu"} == sound


def test_backends_are_listed_and_only_automatic_ones_are_run(monkeypatch):
    run_backends = []
    monkeypatch.setattr(
        fp8_backends, "_run", lambda backend, recipe, device: run_backends.append(backend) or {"y": 0.0}
    )
    checks = {check.name: check for check in fp8_backends.backends(("cpu",))}
    assert set(run_backends) == {"reference"} and len(run_backends) == len(fp8.RECIPES)
    assert {name.split()[0] for name in checks} == set(registry.names())
    torch_check = checks["torch on cpu"]
    assert torch_check.status == ABSENT and torch_check.fix == "none needed"
    assert torch_check.found.startswith(
        "not run: on the CPU it is slower than the reference; request it by name (torch"
    )
    assert checks["triton on cpu"].status == ABSENT and "interpreter" in checks["triton on cpu"].found
    assert checks["triton on cpu"].found.endswith(f"({registry.get('triton').version()})")
    assert checks["deepgemm on cpu"].found == "deep_gemm is not installed"
    assert checks["reference on cpu"].found.startswith(f"torch {torch.__version__}")


def test_automatic_backend_is_run_in_every_supported_recipe(monkeypatch):
    """As on a GPU, where Triton and torch are chosen automatically."""
    backend = registry.get("torch")
    monkeypatch.setattr(type(backend), "why_not_auto", lambda self, device: None)
    checks = {c.name: c for c in fp8_backends.backends(("cpu",)) if c.name.startswith("torch")}
    assert {name for name, check in checks.items() if check.status == OK} == {
        "torch on cpu", "torch tensorwise on cpu", "torch rowwise on cpu", "torch delayed on cpu"
    }  # fmt: skip
    assert checks["torch blockwise on cpu"].status == ABSENT
    assert (
        "1x128 by 128x128 on the CPU; torch has no blocks of 1x128 by 1x128"
        in checks["torch blockwise_1d on cpu"].found
    )


class Fake:
    """The reference backend with some methods replaced."""

    name = "fake"

    def __init__(self, **changed):
        self.__dict__.update(changed)

    def __getattr__(self, name):
        return getattr(registry.get("reference"), name)


@pytest.fixture
def fake(monkeypatch):
    def put(**changed):
        monkeypatch.setattr(registry, "_backends", {**registry._backends, "fake": Fake(**changed)})
        return {c.name: c for c in fp8_backends.backends(("cpu",))}["fake blockwise on cpu"]

    return put


def test_backend_with_wrong_results_fails(fake):
    reference = registry.get("reference")
    wrong = lambda dy, x, dtype: reference.gemm_wgrad(dy, x, dtype) * 2  # noqa: E731
    check = fake(gemm_wgrad=wrong)
    assert check.status == FAIL and "far from high precision: calc_diff of dw 0.2" in check.found
    assert check.means == "fp8.recipe: blockwise cannot be trusted here" and check.fix


def test_limit_of_sound_results_is_shared(monkeypatch):
    """The doctor and measured plans use the same limit."""
    assert bench.SOUND_DIFF is metrics.SOUND_DIFF
    monkeypatch.setattr(metrics, "SOUND_DIFF", 0.0)
    checks = [c for c in fp8_backends.backends(("cpu",)) if c.name.startswith("reference ") and " on " in c.name]
    assert {c.status for c in checks if c.name != "reference on cpu"} == {FAIL}


def test_backend_with_nan_fails(fake):
    nan = lambda x, w, dtype, bias=None: torch.full((x.data.shape[0], w.data.shape[0]), torch.nan, dtype=dtype)  # noqa: E731
    check = fake(gemm_fwd=nan)
    assert check.status == FAIL and "calc_diff of y nan" in check.found


def test_backend_that_raises_fails_with_its_cause(fake):
    def broken(*args):
        raise RuntimeError("no kernel image\nlong trace")

    check = fake(gemm_dgrad=broken)
    assert check.status == FAIL and check.found == "RuntimeError: no kernel image"


def test_unsupported_recipe_is_absent(fake):
    why_not = lambda op, what, device, shape: "needs SM90" if "blockwise" in str(what) else None  # noqa: E731
    check = fake(supports=why_not)
    assert (check.status, check.found) == (ABSENT, "needs SM90")


def test_unsupported_backend_is_one_line(monkeypatch):
    why_not = lambda op, what, device, shape: f"no {op}"  # noqa: E731
    monkeypatch.setattr(registry, "_backends", {**registry._backends, "fake": Fake(supports=why_not)})
    check = single([check for check in fp8_backends.backends(("cpu",)) if check.name.startswith("fake")])
    assert (check.name, check.status) == ("fake on cpu", ABSENT)
    assert check.found.startswith("not run: no fwd; no dgrad; no wgrad (torch")


def test_imports_that_succeed_fail_or_are_missing(tmp_path, monkeypatch):
    good = packages.Package("pytest", "import pytest", "m", "c")
    assert packages.try_import(good).status == OK
    broken = packages.Package("pytest", "raise ImportError('libfoo.so: cannot open')", "no tests", "apt install libfoo")
    check = packages.try_import(broken)
    assert check.status == WARN and check.found.endswith("ImportError: libfoo.so: cannot open")
    assert (check.means, check.fix) == (
        "no tests",
        "fix the named cause, or reinstall: apt install libfoo",
    )
    crash = packages.Package("pytest", "import os; os.kill(os.getpid(), 11)", "m", "c", required=True)
    check = packages.try_import(crash)
    assert check.status == FAIL and check.found.endswith("the import was ended by signal 11")
    missing = packages.Package("no-such-package", "import nothing", "m", "c")
    assert (packages.try_import(missing).status, packages.try_import(missing).found) == (ABSENT, "not installed")
    monkeypatch.setattr(packages, "TIMEOUT_S", 0.2)
    slow = packages.Package("pytest", "import time; time.sleep(9)", "m", "c")
    assert "the import did not finish within 0.2 s" in packages.try_import(slow).found


def test_packages_are_imported_together_and_separately_on_failure(monkeypatch):
    """Packages share one process, so that torch is loaded once; those that fail there are imported separately."""
    separate = []
    real = packages.try_import
    monkeypatch.setattr(packages, "try_import", lambda package: separate.append(package.statement) or real(package))
    ok = packages.Package("pytest", "import pytest; print('noise')", "m", "c")
    bad = packages.Package("pytest", "raise ImportError('libfoo.so')", "m", "c")
    missing = packages.Package("no-such-package", "import nothing", "m", "c")
    crash = packages.Package("pytest", "import os; os.kill(os.getpid(), 11)", "m", "c", required=True)
    after, last = (packages.Package("pytest", f"import {name}", "m", "c") for name in ("json", "math"))
    checks = import_checks((ok, bad, missing, after, crash, last))
    assert [c.status for c in checks] == [OK, WARN, ABSENT, OK, FAIL, OK]
    assert "ImportError: libfoo.so" in checks[1].found and "signal 11" in checks[4].found
    assert sorted(separate) == sorted([bad.statement, missing.statement, crash.statement, last.statement])


def test_hanging_import_is_ended(monkeypatch):
    monkeypatch.setattr(packages, "TIMEOUT_S", 0.5)
    slow = packages.Package("pytest", "import time; time.sleep(60)", "m", "c")
    assert "the import did not finish within 0.5 s" in single(import_checks((slow,))).found


def test_cause_is_the_line_of_the_exception():
    text = "Traceback ...\nModuleNotFoundError: No module named 'x'\n\nsome.pkg.OtherError: real\nhint: see docs\n"
    done = subprocess.CompletedProcess([], 1, "", text)
    assert packages.cause(done) == "some.pkg.OtherError: real"
    assert packages.cause(subprocess.CompletedProcess([], 3, "", "")) == "exit code 3"


def test_versions_out_of_range_fail(monkeypatch):
    real = environment.version
    monkeypatch.setattr(environment, "version", lambda name: "2.9" if name == "torch" else real(name))
    check = single([c for c in machine.versions() if c.status == FAIL])
    assert (check.name, check.found, check.fix) == ("torch", "2.9", "pip install 'torch>=2.11'")
    assert "torch >=2.11" in check.means


def record(**fields):
    return {"cpu": {"model": "x", "usable_cores": 2}, "memory_bytes": 8 * GIB, "gpus": [], "torch": {}, **fields}


def test_devices_and_missing_gpus():
    cpu, gpu = machine.devices(record())
    assert cpu.found == "x, 2 cores, 8 GiB of memory"
    assert (gpu.status, gpu.found) == (ABSENT, "none")
    cpu, _ = machine.devices(record(torch={"cpu_bf16": False}))
    assert cpu.found.endswith("memory, no BF16 instructions (computed in fp32)")
    _, gpu = machine.devices(record(driver="580.1", torch={"version": "2.13+cpu", "cuda_build": None}))
    assert gpu.status == WARN and "torch 2.13+cpu is built without CUDA" in gpu.found
    _, gpu = machine.devices(record(driver="580.1", torch={"cuda_build": "13.0"}, unread={"gpus": "RuntimeError: no"}))
    assert gpu.status == WARN and "sees no GPU: RuntimeError: no" in gpu.found and "--gpus all" in gpu.fix
    old = {"name": "A100", "capability": "8.0", "memory_bytes": 80 * GIB}
    new = {"name": "H200", "capability": "9.0", "memory_bytes": 141 * GIB}
    _, first, second = machine.devices(record(gpus=[old, new], accelerator={"type": "cuda", "found": "cuda"}))
    assert (first.name, first.status, second.status) == ("cuda:0", WARN, OK)
    assert "no FP8 units" in first.means


def test_machines_of_other_vendors():
    """The description of a machine determines its devices, why each backend is not used, and that it is untested."""

    def vendor_checks(**fields):
        checks = {check.name: check for check in machine.devices(record(**fields))[1:]}
        assert all("never tested by this project" in c.means for c in checks.values() if c.status == WARN)
        return checks

    def accelerator(kind, *missing, **fields):
        return {"type": kind, "found": kind, "high": "bf16", "lacks": list(missing), **fields}

    ascend = vendor_checks(
        accelerator=accelerator("npu", "FP8 dtypes", "graphs", devices=[{"name": "910B", "memory_bytes": 64 * GIB}])
    )
    assert ascend["npu:0"].found == "Ascend NPU (npu): 910B, 64 GiB"
    assert "cannot hold FP8 codes" in ascend["npu:0"].means and "OCTAVO_DEVICE=cpu" in ascend["npu:0"].fix
    assert ascend["npu lacks"].found == "FP8 dtypes, graphs" and ascend["triton on npu"].status == ABSENT
    card = {"name": "Instinct MI300X", "architecture": "gfx942", "memory_bytes": 192 * GIB}
    amd = vendor_checks(
        gpus=[card], accelerator=accelerator("cuda", devices=[card]), torch={"rocm_build": "6.4"}
    )  # torch reports cuda
    assert amd["rocm:0"].found == "AMD GPU (rocm): Instinct MI300X gfx942, 192 GiB"
    assert "reference backend would be used" in amd["rocm:0"].means and "e4m3fnuz" in amd["torch on rocm"].found
    intel = vendor_checks(accelerator=accelerator("xpu", devices=[{"name": "Max 1550"}, {"name": "Max 1550"}]))
    assert {"xpu:0", "xpu:1"} <= set(intel) and "in BF16" in intel["xpu:1"].means
    left_out = {"type": "cpu", "found": "mps", "left_out": "mps does not support float8_e4m3fn"}
    assert "not used: mps does not support float8_e4m3fn" in vendor_checks(accelerator=left_out)["mps"].found
    assert (
        "device of another kind (tpuish)"
        in vendor_checks(accelerator=accelerator("tpuish", devices=[{}]))["tpuish:0"].found
    )
    unseen = vendor_checks(signs=["ascend", "amd"])
    assert "torch_npu" in unseen["npu"].found and "CANN" in unseen["npu"].fix and "rocm" in unseen["rocm"].fix
    plain = machine.devices(record(signs=[], accelerator={"type": "cpu", "found": "cpu"}))
    assert [check.name for check in plain] == ["cpu", "gpu"]


def test_storage(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    free = {tmp_path / "shm": GIB // 16, tmp_path: GIB}
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(0, 0, free[path]))
    shm, disk = machine.storage(tmp_path, tmp_path / "shm")
    assert (shm.status, shm.found) == (WARN, "64 MiB free") and "--shm-size" in shm.fix
    assert (disk.status, disk.found) == (WARN, "1 GiB free")
    free.update({tmp_path / "shm": 8 * GIB, tmp_path: 80 * GIB})
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    shm, disk, locked = machine.storage(tmp_path, tmp_path / "shm")
    assert (shm.status, disk.status, locked.found) == (OK, OK, "not writable")
    assert len(machine.storage(tmp_path, tmp_path / "none")) == 2


def test_process_groups(monkeypatch):
    gloo = single(machine.process_groups())
    assert (gloo.status, gloo.found) == (OK, "a group of one reduced a tensor")

    def broken(*args, **kwargs):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(torch.distributed, "init_process_group", broken)
    gloo = single(machine.process_groups())
    assert (gloo.status, gloo.found) == (WARN, "RuntimeError: no route to host") and "GLOO_SOCKET_IFNAME" in gloo.fix
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert single(machine.process_groups()).found == "not built in"


class FakeImports:
    """A stand-in for :class:`packages.SharedImports` that imports nothing."""

    def __init__(self, which, broken=""):
        self.broken = broken

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def check(self, package):
        if package.distribution == self.broken:
            return Check("imports", package.distribution, FAIL, "OSError: libcudart")
        return Check("imports" if package.required else "optional", package.distribution, OK, "1.0")

    def checks(self, which):
        return [self.check(package) for package in which]


def test_examination_continues_if_torch_is_broken(monkeypatch):
    monkeypatch.setattr(packages, "SharedImports", lambda which: FakeImports(which, "torch"))
    messages = []
    report = doctor.examine(messages.append)
    assert not report.healthy
    skipped = single([c for c in report.checks if c.area == "fp8"])
    assert skipped.found == "not checked: torch does not import (OSError: libcudart)"
    assert any(c.area == "storage" for c in report.checks) and "importing packages" in messages


def test_full_examination(monkeypatch):
    """All checks except the imports, which take long and have a separate test."""
    monkeypatch.setattr(packages, "SharedImports", FakeImports)
    stages = []
    report = doctor.examine(stages.append)
    assert len(stages) == doctor.STAGES
    assert report.healthy, report.of(FAIL)
    areas = list(dict.fromkeys(check.area for check in report.checks))
    assert areas == ["versions", "imports", "devices", "fp8", "distributed", "storage", "optional"]
    assert json.loads(json.dumps(report.to_json()))["healthy"] is True
    assert report.environment["torch"]["version"] == torch.__version__


@pytest.mark.long
def test_required_packages_can_be_imported():
    assert {check.status for check in import_checks(packages.REQUIRED)} == {OK}


def test_required_imports_are_dependencies():
    assert {package.distribution for package in packages.REQUIRED} <= set(environment.REQUIRED)
    assert all(package.means and package.fix for package in packages.REQUIRED + packages.OPTIONAL)


def test_report_filters_by_status():
    report = Report((Check("a", "b", OK, "c"), Check("a", "d", WARN, "e")), {})
    assert report.healthy and [c.name for c in report.of(WARN)] == ["d"]
    assert isinstance(SimpleNamespace(**report.to_json()).checks, list)


def test_recipes_of_gpus_that_this_machine_does_not_have():
    """Every GPU with FP8 tensor cores runs every recipe, by torch where cuBLAS multiplies by its scales."""
    for gpu in other_gpus.GPUS:
        backends = {
            name: kernels.backends_on(gpu.capability, fp8.recipe(name), other_gpus.CUDA) for name in fp8.RECIPES
        }
        assert all(backends.values()) and backends["tensorwise"] == ("torch",)
        assert (backends["blockwise"] == ("torch",)) == (gpu.name == "Hopper")
        assert (backends["mxfp8"] == ("torch",)) == gpu.name.startswith("Blackwell")
        line = other_gpus.describe_gpu(gpu)
        assert ("mxfp8*" in line) == (gpu.capability < (10, 0)) and all(name in line for name in fp8.RECIPES)
        assert f"auto takes {fastest_on(gpu.capability[0])};" in line
    assert kernels.backends_on((8, 0), fp8.recipe("rowwise"), other_gpus.CUDA) == ()
    assert kernels.backends_on((9, 0), fp8.recipe("blockwise"), (12, 8)) == ("triton",)


def test_quick_examination_imports_only_torch(monkeypatch):
    requested = []
    monkeypatch.setattr(packages, "SharedImports", lambda which: requested.extend(which) or FakeImports(which))
    report = doctor.examine(every_package=False)
    assert [package.distribution for package in requested] == ["torch"]
    assert report.healthy and not [check for check in report.checks if check.area == "optional"]
    lines = doctor_command.describe_cpu_machine(report)
    assert len(lines) <= 12 and lines[-1] == "All required checks passed."
    assert all(name in lines[1] for name in fp8.RECIPES)
    broken = Report(
        (*report.checks, Check("storage", "/dev/shm", WARN, "64 MiB free", "workers crash", "--shm-size")), {}
    )
    assert "  fix:   --shm-size" in doctor_command.describe_cpu_machine(broken)


def test_command_is_short_without_an_accelerator_and_thorough_with_one(monkeypatch, capsys):
    requests = []
    report = Report((Check("fp8", "reference blockwise on cpu", OK, "x"),), {})
    monkeypatch.setattr(doctor, "examine", lambda log, every_package=True: requests.append(every_package) or report)
    for drivers, words in (([], []), ([], ["--all"]), ([], ["--json"]), (["nvidia"], [])):
        monkeypatch.setattr(environment, "find_drivers", lambda drivers=drivers: drivers)
        assert main(["doctor", *words]) == 0
    assert requests == [False, True, True, True]
    out = capsys.readouterr().out
    assert out.startswith("here: a CPU; no GPU") and out.count("Hopper") == 1


def test_failing_nvidia_smi_counts_as_a_driver(monkeypatch):
    def fail():
        raise OSError("nvidia-smi ended with 9")

    monkeypatch.setattr(environment, "_driver", fail)
    assert environment.find_drivers()[0] == "nvidia"


@pytest.mark.long
def test_quick_examination_imports_no_heavy_modules():
    """torch's own imports do not count: the first FP8 layer imports torch._dynamo, which imports Triton."""
    script = (
        "import sys; from octavo.cli.main import main; from octavo.base import environment; "
        "environment.find_drivers = lambda: []; code = main(['doctor']); heavy = {'transformers', 'matplotlib', "
        "'scipy', 'datasets', 'peft'} & set(sys.modules); print(heavy, file=sys.stderr); "
        "sys.exit(code or bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < len(done.stdout.splitlines()) <= 12
