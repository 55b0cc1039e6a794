"""Seals and unseals adapters: A has the input axis of its layer and B the output axis; both are permuted accordingly.

lora_A.weight [r, K], lora_B.weight [N, r], lora_magnitude_vector [N]     of a linear layer [N, K]
lora_A.weight [r E, K], lora_B.weight [N, r E]                            of E experts (octavo.adapters.experts)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from octavo import models
from octavo.adapters.files import CONFIG, WEIGHTS, read_config, read_state
from octavo.base import atomic_write, safe_read
from octavo.base.seal_note import Note, read_note, write_note
from octavo.sealing import permute
from octavo.sealing.errors import SealError
from octavo.sealing.folder import check_sealed_with
from octavo.sealing.key import Key
from octavo.sealing.permute import Axis, Layout, Orders
from octavo.sealing.structure import Structure, read_structure

_PREFIX = "base_model.model."
_EXPERTS = ("gate_up_proj", "down_proj")
Permute = Callable[[Tensor, Layout, Orders], Tensor]


def seal_adapter(source: str | Path, target: str | Path, base: str | Path, key: Key) -> Path:
    """Seal a plain adapter for the sealed twin `base`, so that a sealed run can start from it (`lora.adapter`). Raises
    SealError and AdapterError."""
    check_sealed_with(base, key)
    if read_note(source, SealError) is not None:
        raise SealError(f"{source} is sealed already. Use the plain adapter")
    return _write_adapter(
        Path(source), Path(target), Path(base), key, permute.seal_tensor, Note("adapter", key.fingerprint)
    )


def unseal_adapter(source: str | Path, target: str | Path, base: str | Path, key: Key) -> Path:
    """Unseal an adapter that was trained with a sealed twin.

    base  the plain model of the adapter. The adapter's note must name this key

    Raises SealError and AdapterError.
    """
    if read_note(base, SealError) is not None:
        raise SealError(f"{base} is sealed. Use the plain model of the adapter")
    check_sealed_with(source, key)
    return _write_adapter(Path(source), Path(target), Path(base), key, permute.unseal_tensor)


def _write_adapter(source: Path, target: Path, base: Path, key: Key, move: Permute, note: Note | None = None) -> Path:
    if target.exists():
        raise SealError(f"{target} exists, and nothing is overwritten. Choose another folder, or delete it")
    config, state = read_config(source), read_state(source)
    stock = models.empty(base)
    axes = read_structure(stock)
    orders = axes.draw(key)
    permuter = _AdapterPermuter(stock, axes, orders, config, move)
    permuted = {name: permuter.permute(name, value).contiguous() for name, value in state.items()}
    raw = safe_read.read_json(source / CONFIG, SealError) | {"base_model_name_or_path": str(base)}
    with atomic_write.new_folder(target, SealError) as folder:
        save_file(permuted, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if note is not None:
            write_note(folder, note)
        atomic_write.sync_tree(folder)
    return target


class _AdapterPermuter:
    """Permutes the tensors of one adapter."""

    def __init__(self, model: Any, axes: Structure, orders: Orders, config: Any, move: Permute) -> None:
        self.modules, self.layouts = dict(model.named_modules()), axes.layouts
        self.orders, self.config, self.move = orders, config, move

    def permute(self, name: str, value: Tensor) -> Tensor:
        """Return the tensor of an adapter by its name in the file, permuted like its layer's axes."""
        path, _, kind = name.removeprefix(_PREFIX).rpartition(".lora_")
        depth = path.count(".base_layer")
        module = path.replace(".base_layer", "")
        first = kind.startswith("A")
        if f"{module}.weight" in self.layouts:
            out, into = self.layouts[f"{module}.weight"].axes
            if kind.startswith("magnitude"):
                return self.move(value, Layout((out,)), self.orders)
            return self.move(value, Layout(((), into) if first else (out, ())), self.orders)
        adapted = [p for p in _EXPERTS if any(t.endswith(f".{p}") for t in self.config.target_parameters or ())]
        if f"{module}.{_EXPERTS[0]}" not in self.layouts or depth >= len(adapted):
            raise SealError(f"{name} does not belong to a layer that sealing supports")
        layout = self.layouts[
            f"{module}.{adapted[len(adapted) - 1 - depth]}"
        ]  # PEFT wraps the first parameter innermost
        transposed = bool(getattr(self.modules[module], "is_transposed", False))
        return self._experts(value, layout, first, transposed)

    def _experts(self, value: Tensor, layout: Layout, first: bool, transposed: bool) -> Tensor:
        """Return a [r E, K], expert by expert, or B [N, r E], whose columns are ordered by rank, then by expert."""
        experts = len(layout.each)

        def axis(axes: tuple[Axis, ...]) -> Axis:
            out, into = axes[::-1] if transposed else axes
            return into if first else out

        each = tuple(((), axis(axes)) for axes in layout.each)
        stacked_layout = Layout(layout.axes, each=each)
        if first:
            stacked = value.reshape(experts, -1, value.shape[1])
            return self.move(stacked, stacked_layout, self.orders).reshape(value.shape)
        stacked = value.reshape(value.shape[0], -1, experts).permute(2, 1, 0)
        back: Tensor = self.move(stacked, stacked_layout, self.orders).permute(2, 1, 0).reshape(value.shape)
        return back


__all__ = ["seal_adapter", "unseal_adapter"]
