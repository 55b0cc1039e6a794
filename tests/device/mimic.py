"""The example device: how its library is built, and how a process gets it, as a vendor's package would give it.

    python -m tests.device.mimic LIBRARY cpu|mimic FILE RUN...     # trains there; prints what came of it as JSON

It is for a process of its own: a name given to PrivateUse1 stays, and so does what torch thinks its accelerator is.
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
    """The library, compiled against this torch. Raises CalledProcessError with what the compiler said."""
    home, made = Path(torch.__file__).parent, folder / f"{NAME}.so"
    includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{home / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    words = [compiler(), "-std=c++20", "-O0", "-w", "-fPIC", "-shared", abi, *includes, str(SOURCE), "-o", str(made)]
    subprocess.run([*words, *libraries], check=True, capture_output=True, text=True)
    return made


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def register(library: Path) -> None:
    """What a vendor's package does when it is imported: a name, kernels, and a module that says what is there."""
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


class Sees(train.Callback):
    """Notes where the model is, and ends the run after step ``last``."""

    def __init__(self, last: int | None = None) -> None:
        self.last, self.device = last, ""

    def begin(self, run: train.Run) -> None:
        self.device = str(next(run.model.parameters()).device)

    def end_step(self, run: train.Run, step: train.Step) -> None:
        if step.number == self.last:
            run.stop()


def main(library: str, device: str, file: str, *runs: str) -> None:
    """Train what each of ``runs`` asks of the configuration ``file`` (words, apart by blanks; ``stop=2`` ends it after
    step 2, ``device=`` names a type of device), one after the other."""
    if device == NAME:
        register(Path(library))
    told: list[dict[str, Any]] = []
    for words in runs:
        own = dict(word.split("=") for word in words.split() if word.startswith(("stop=", "device=")))
        over = [word for word in words.split() if word.partition("=")[0] not in own]
        sees = Sees(int(own["stop"]) if "stop" in own else None)
        if "device" in own:
            os.environ[accelerator.VARIABLE] = own["device"]
        try:
            result = train.run(load_config_text(Path(file).read_text(), over), callbacks=[sees])
        except (train.TrainError, fp8.BackendError) as error:  # what Octavo refuses; all else is a failure
            told.append({"error": str(error)})
        else:
            told.append({"losses": list(result.losses().values()), "device": sees.device})
    here = accelerator.default_device()
    print(json.dumps({"runs": told, "here": here.type, "abilities": accelerator.list_abilities(here)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
