"""Checks packages by importing them in another process, so that a crash does not end the doctor.

They share one process, because most of them import torch, which takes longer than everything else. A package that fails
there, or comes after one that ended the process, is imported again in a separate process to find the cause.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from octavo.base import environment
from octavo.doctor.report import ABSENT, FAIL, OK, WARN, Check

TIMEOUT_S = 180
_MARK = "octavo imported"
_REPAIR = "fix the named cause, or reinstall: "


@dataclass(frozen=True)
class Package:
    """``statement`` must run; ``means``: what does not work without it; ``fix``: how to install it."""

    distribution: str
    statement: str
    means: str
    fix: str
    required: bool = False


REQUIRED = (
    Package("torch", "import torch", "nothing runs without torch", "pip install 'torch>=2.11'", required=True),
    Package(
        "transformers",
        "from transformers import Qwen3VLForConditionalGeneration, AutoTokenizer",
        "no model can be loaded",
        "pip install --upgrade 'transformers>=5.17,<5.25' tokenizers safetensors",
        required=True,
    ),
    Package(
        "matplotlib",
        "import matplotlib; matplotlib.use('Agg'); import matplotlib.figure",
        "octavo compare cannot draw its plots",
        "pip install --upgrade matplotlib",
        required=True,
    ),
    Package(
        "tensorboard",
        "from torch.utils.tensorboard import SummaryWriter",
        "training stops when it writes TensorBoard events",
        "pip install --upgrade tensorboard, or run.tensorboard: false",
        required=True,
    ),
    Package(
        "scipy",
        "from scipy.stats import nct, t",
        "octavo demo, trial and compare cannot compute their verdicts",
        "pip install --upgrade scipy",
        required=True,
    ),
    Package(
        "peft",
        "import peft",
        "no LoRA: adapters cannot be attached or loaded",
        "pip install --upgrade peft",
        required=True,
    ),
)

OPTIONAL = (
    Package("triton", "import triton", "no fast FP8 kernels on a GPU", "it comes with CUDA builds of torch"),
    Package(
        "deep_gemm",
        "import deep_gemm; deep_gemm.fp8_gemm_nt",  # PyPI's deep-gemm is a different project
        "no DeepGEMM kernels on Hopper and later",
        "build it from github.com/deepseek-ai/DeepGEMM",
    ),
    Package("flash-attn", "import flash_attn", "attention uses torch's own kernels", "pip install flash-attn"),
    Package(
        "soundfile",
        "import soundfile, soxr",
        "rows with audio cannot be read, or only at the model's sampling rate",
        "pip install 'octavo[audio]'",
    ),
    Package("av", "import av", "rows with videos cannot be read", "pip install 'octavo[video]'"),
    Package(
        "cryptography",
        "from cryptography.hazmat.primitives.ciphers.aead import AESGCM",
        "encrypted files cannot be read or written",
        "pip install 'octavo[sealed]'",
    ),
    Package("ray", "import ray", "no rollouts by replicas (rl.engine: ray)", "pip install 'octavo[ray]'"),
    Package("torchao", "import torchao", "benchmarks do not include it", "pip install torchao"),
    Package("trl", "import trl", "FP8 in TRL's trainers, and some tests", "pip install 'octavo[trainer]'"),
    Package(
        "num2words", "import num2words", "SmolVLM's stock processor does not load", "pip install 'octavo[trainer]'"
    ),
    Package(
        "torchvision",
        "import torchvision",
        "images are resized by Pillow, slightly differently; where AutoProcessor fails, "
        "octavo.models.load_processor works, also in a Transformers or TRL trainer",
        "pip install torchvision from the index that torch came from; PyPI's build fails with a CPU torch",
    ),
)


_SCRIPT = f"""
import gc, os, sys
gc.disable()  # imported objects live until the process ends
for number, statement in enumerate(sys.argv[1:]):
    try:
        exec(statement, {{}})
    except BaseException:
        continue
    os.write(1, b"\\n{_MARK} %d\\n" % number)
os._exit(0)
"""


class SharedImports:
    """One process that imports packages one after the other, started at once; `check` waits for its result.

    A context manager: the process ends on exit, or after ``TIMEOUT_S``. Use it from one thread only.
    """

    def __init__(self, requested: Sequence[Package]) -> None:
        installed = [package for package in requested if environment.version(package.distribution) is not None]
        self._numbers = {package: number for number, package in enumerate(installed)}
        self._good: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *(package.statement for package in installed)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
        )  # fmt: skip
        self._timer = threading.Timer(TIMEOUT_S, self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> SharedImports:
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()

    def check(self, package: Package) -> Check:
        """Check a package like :func:`try_import`, but use the result of the shared process if it imported the
        package."""
        if self._imported(package):
            installed = environment.version(package.distribution) or ""
            return Check("imports" if package.required else "optional", package.distribution, OK, installed)
        return try_import(package)

    def checks(self, requested: Sequence[Package]) -> list[Check]:
        """Return one check per package, in this order; separate imports run two at a time."""
        for package in requested:
            self._imported(package)
        with ThreadPoolExecutor(max_workers=2) as pool:
            return list(pool.map(self.check, requested))

    def _imported(self, package: Package) -> bool:
        """Return whether the shared process imported the package; reads its output until the result is known."""
        number = self._numbers.get(package)
        if number is None:
            return False
        assert self._process.stdout is not None
        while number not in self._good and (line := self._process.stdout.readline()):
            words = line.rsplit(maxsplit=1)
            if len(words) == 2 and words[0] == _MARK:
                self._good.add(int(words[1]))
                if max(self._good) > number:  # results are in order, so this import failed
                    break
        return number in self._good


def try_import(package: Package) -> Check:
    """Import one package in a fresh interpreter, if it is installed, and report the cause of a failure."""
    area = "imports" if package.required else "optional"
    version = environment.version(package.distribution)
    broken = FAIL if package.required else WARN
    if version is None:
        status = FAIL if package.required else ABSENT
        return Check(area, package.distribution, status, "not installed", package.means, package.fix)
    try:
        done = subprocess.run(
            [sys.executable, "-c", package.statement], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        problem = f"{version}: the import did not finish within {TIMEOUT_S} s"
        return Check(area, package.distribution, broken, problem, package.means, _REPAIR + package.fix)
    if done.returncode == 0:
        return Check(area, package.distribution, OK, version)
    problem = f"{version}: {cause(done)}"
    return Check(area, package.distribution, broken, problem, package.means, _REPAIR + package.fix)


def cause(done: subprocess.CompletedProcess[str]) -> str:
    """Return why the process failed: the line with the exception, or the signal that ended it."""
    if done.returncode < 0:
        return f"the import was ended by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]
