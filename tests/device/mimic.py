"""The example device: how its library is built, and how a process gets it, as a vendor's package would give it.

    python -m tests.device.mimic LIBRARY cpu|mimic FILE RUN...     # trains there; prints what came of it as JSON

It is for a process of its own: a name given to PrivateUse1 stays, and so does what torch thinks its accelerator is.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import torch

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


def main(library: str, device: str, text: str, *runs: str) -> None:
    """Train what each of ``runs`` asks (words, apart by blanks) of the configuration ``text``, one after the other."""
    if device == NAME:
        register(Path(library))
    from octavo import train
    from octavo.config import load_config_text

    told = []
    for words in runs:
        where: list[str] = []
        see = _Sees(where)
        try:
            result = train.run(load_config_text(Path(text).read_text(), words.split()), callbacks=[see])
            told.append({"losses": list(result.losses().values()), "device": where, "status": result.status})
        except (train.TrainError, ValueError, RuntimeError) as error:
            told.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(told))


def _Sees(where: list[str]):
    from octavo import train

    class Sees(train.Callback):
        def begin(self, run: train.Run) -> None:
            where.append(str(next(run.model.parameters()).device))

    return Sees()


if __name__ == "__main__":
    main(*sys.argv[1:])
