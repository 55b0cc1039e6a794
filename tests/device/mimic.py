"""An example device: builds its library, and registers it in a process as a vendor's package would.

    python -m tests.device.mimic LIBRARY cpu|mimic FILE RUN...     # trains there; prints the results as JSON

It runs in a separate process, because the name of PrivateUse1 and torch's accelerator cannot be changed back.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch

from octavo import fp8, train
from octavo.base import accelerator
from octavo.config import load_config_text

SOURCE = Path(__file__).with_name("mimic.cpp")
NAME = "mimic"


def build(folder: Path) -> Path:
    """Compile the library against this torch. Raises CalledProcessError with the output of the compiler."""
    root, library = Path(torch.__file__).parent, folder / f"{NAME}.so"
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    words = [compiler(), "-std=c++20", "-O0", "-w", "-fPIC", "-shared", abi, *includes, str(SOURCE), "-o", str(library)]
    subprocess.run([*words, *libraries], check=True, capture_output=True, text=True)
    return library


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def register(library: Path) -> None:
    """Do what a vendor's package does on import: register a name, kernels, and a module that describes the device."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(library)
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()


class DeviceRecorder(train.Callback):
    """Records the device of the model, and stops the run after step ``last``."""

    def __init__(self, last: int | None = None) -> None:
        self.last, self.device = last, ""

    def begin(self, run: train.Run) -> None:
        self.device = str(next(run.model.parameters()).device)

    def end_step(self, run: train.Run, step: train.Step) -> None:
        if step.number == self.last:
            run.stop()


def main(library: str, device: str, file: str, *runs: str) -> None:
    """Train each of ``runs`` with the configuration ``file``, one after the other. A run is a list of overrides
    separated by blanks; ``stop=2`` stops it after step 2, ``device=`` selects a device type."""
    if device == NAME:
        register(Path(library))
    results: list[dict[str, Any]] = []
    for words in runs:
        options = dict(word.split("=") for word in words.split() if word.startswith(("stop=", "device=")))
        overrides = [word for word in words.split() if word.partition("=")[0] not in options]
        recorder = DeviceRecorder(int(options["stop"]) if "stop" in options else None)
        if "device" in options:
            os.environ[accelerator.VARIABLE] = options["device"]
        try:
            result = train.run(load_config_text(Path(file).read_text(), overrides), callbacks=[recorder])
        except (train.TrainError, fp8.BackendError) as error:  # expected errors
            results.append({"error": str(error)})
        else:
            results.append({"losses": list(result.losses().values()), "device": recorder.device})
    here = accelerator.default_device()
    print(json.dumps({"runs": results, "here": here.type, "abilities": accelerator.list_abilities(here)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
