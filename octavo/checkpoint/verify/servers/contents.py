"""What a server's loader looks at: the tensors of a folder, its config.json, and the model that this describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from octavo.checkpoint.stock_model import Linear, StockModel
from octavo.checkpoint.verify.headers import FileTensor
from octavo.checkpoint.verify.servers.files import ServerFiles

#: classes of which tests/server loads folders in vLLM, which chooses its own class by `architectures`
LOADED_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class Contents:
    """The headers and config.json of a folder.

    files     what servers read (`servers.files`)
    names     name on disk -> the stock model's name, for weights that it has
    stock     the model of config.json
    raw       config.json
    block     its quantization_config, or None
    quick     no values are read
    """

    files: ServerFiles
    names: Mapping[str, str]
    stock: StockModel
    raw: Mapping[str, object]
    block: object
    quick: bool = False

    @property
    def tensors(self) -> Mapping[str, FileTensor]:
        """Name on disk -> tensor that servers read."""
        return self.files.tensors

    @cached_property
    def dense_text(self) -> bool:
        """Whether the model is a text-only decoder without experts: the kind for which vLLM's rules are known."""
        towers = any(key in self.raw for key in ("vision_config", "audio_config", "text_config"))
        return not towers and not any(layer.expert for layer in self.stock.linears.values())

    @property
    def loaded_in_vllm(self) -> bool:
        """Whether folders of this class were loaded in vLLM, good ones and damaged ones."""
        classes = self.raw.get("architectures")
        known = isinstance(classes, list) and bool(classes) and all(name in LOADED_CLASSES for name in classes)
        return self.dense_text and known

    @cached_property
    def embedding(self) -> str | None:
        """Name on disk of the input embeddings."""
        module = self.stock.model.get_input_embeddings()
        names = [name for name, candidate in self.stock.modules.items() if candidate is module]
        return next((disk for name in names for disk in self.stock.disk.get(f"{name}.weight", ())), None)

    @cached_property
    def matrices(self) -> list[tuple[Linear, ...]]:
        """The linear layers as servers hold them: fused groups as one, all others alone; without the head and without
        layers that config.json ties."""
        grouped = {layer.disk for group in self.stock.fused_groups for layer in group}
        single = [
            (layer,)
            for name, layer in self.stock.linears.items()
            if layer.disk not in grouped and name not in (self.stock.head, *self.stock.tied_on_disk)
        ]
        return [*self.stock.fused_groups, *single]

    @cached_property
    def high_precision(self) -> frozenset[str]:
        """Names on disk of layers that servers build without quantization, whatever the config lists: routers."""
        names = (name.removesuffix(".weight") for name in self.stock.shapes)
        leaves = {name: name.rpartition(".")[2] for name in names}
        return frozenset(n for n, leaf in leaves.items() if leaf in ("gate", "shared_expert_gate") or "router" in leaf)

    def module_exists(self, name: str) -> bool:
        """Whether the model has a module of this name (in memory or on disk)."""
        return name in self.stock.names

    def is_linear(self, name: str) -> bool:
        """Whether a name on disk is of a linear layer's weight or bias, or of the embeddings."""
        weight = f"{name.rpartition('.')[0]}.weight"
        module = self.stock.modules.get(self.stock.to_module(weight).rpartition(".")[0])
        return weight in self.stock.linears or weight == self.embedding or isinstance(module, nn.Linear)
