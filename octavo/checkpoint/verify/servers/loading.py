"""Predicts what vLLM and SGLang do with the names, shapes and dtypes of a folder, by the rules of their loaders.

Both build every parameter first, copy the tensors of the files into them by name, and hardly ask afterwards what was
not filled. The rules of vLLM 0.32, seen on a CPU (`docs/checkpoints.md`):

    missing      refused only in a folder without quantization_config, and only for modules without a quantization
                 method: norms. Linear layers, embeddings and all of a quantized folder stay uninitialized in silence
                 (`DefaultModelLoader.load_weights`, `track_weights_loading`).
    unexpected   refused (`AutoWeightsLoader`), except biases, KV cache scales of a quantized folder, rotary tables
    shapes       a part of a fused matrix is cut to its first rows, o_proj and down_proj to their first columns; any
                 other difference is refused (`load_merged_column_weight`, `load_row_parallel_weight`)
    dtypes       values are copied into the parameter's dtype, whatever they mean
    tied head    with an lm_head in any file, read or not, the head is untied (`maybe_untie_word_embeddings`)
    fused        a whole qkv_proj or gate_up_proj is split (`_load_fused_module_from_checkpoint`)
    class        chosen by architectures, whatever the model_type (`servers.classes`)
    config.json  the MLPs of these families take only silu; without architectures, transformers' name of the model
                 without a head is looked up (`get_config`), which most families have only as an embedding model

SGLang's models for text (`LlamaForCausalLM.load_weights`) check nothing after loading, leave out unexpected names with
a warning where no fused matrix is concerned, skip layers beyond num_hidden_layers, and drop a tied lm_head.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.checkpoint.stock_model import Linear
from octavo.checkpoint.verify.findings import GARBAGE, OK, REFUSES, UNKNOWN, Consequence
from octavo.checkpoint.verify.headers import FileTensor
from octavo.checkpoint.verify.servers.classes import find_other_class, judge_other_class
from octavo.checkpoint.verify.servers.contents import LOADED_CLASSES, Contents
from octavo.checkpoint.verify.servers.layout import Layout, Refusal, read_layout, takes_integers
from octavo.checkpoint.verify.skip_lists import is_listed_for, is_server_target
from octavo.fp8.arithmetic import E4M3
from octavo.models.folder.quantization import is_cache_scale, matches_target

_HIGH = ("F32", "BF16", "F16", "F64")
_DROPPED = re.compile(r"rotary_pos_emb\.inv_freq|rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
#: scales of a KV cache that vLLM 0.32 has parameters for (`get_cache_scale_mapper` of the method's config)
_READ_CACHE_SCALES = {
    "fp8": re.compile(r"\.([qkv]_scale|kv_scale|[qkv]_proj\.output_scale|attn\.prob_scale)$"),
    "compressed-tensors": re.compile(r"\.([qkv]_scale|kv_scale)$"),
}
_FUSED_NAMES = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_FUSED_PARTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: classes of text models whose MLP in vLLM and SGLang refuses all but silu
_ONLY_SILU = (*LOADED_CLASSES, "Phi3ForCausalLM", "GraniteForCausalLM")
#: model_type of the families that vLLM serves as text models without architectures (its registry has e.g. "LlamaModel")
_WITHOUT_ARCHITECTURES = ("llama", "mistral", "qwen2")


class Server(NamedTuple):
    """The rules in which the loaders differ.

    asks_for_norms  a folder without quantization must have the tensors of modules without a quantization method
    refuses_names   unexpected names are refused, not left out
    unties          an lm_head on disk is used, although config.json ties it
    """

    name: str
    asks_for_norms: bool
    refuses_names: bool
    unties: bool


SERVERS = {server.name: server for server in (Server("vLLM", True, True, True), Server("SGLang", False, False, False))}


@dataclass(frozen=True)
class Slot:
    """A parameter, or the part of one, that a tensor of the files fills.

    shape  the shape that it needs; () is one number, stored as [] or [1]
    role   "values", "codes" or "scale"
    cut    the dimension in which a longer tensor is cut to its beginning, or None
    """

    shape: tuple[int, ...]
    role: str = "values"
    cut: int | None = None

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is loaded, whole or cut."""
        if not self.shape:
            return shape in ((), (1,))
        if len(shape) != len(self.shape):
            return False
        pairs = enumerate(zip(shape, self.shape, strict=True))
        return all(found == wanted or (i == self.cut and found > wanted) for i, (found, wanted) in pairs)


def predict(contents: Contents, name: str) -> list[Consequence] | None:
    """Return what a server's loader does with a folder: how it accepts it, and one consequence for each problem.

    None if quantization_config has a form that is not predicted.
    """
    loading = _Loading(contents, SERVERS[name])
    if contents.files.in_mistral_format:
        only = contents.files.only
        which = f"only {only} is read, which is" if only else "a file is read too that is"
        return [Consequence(UNKNOWN, f"{which} in Mistral's own format")]
    try:
        layout = read_layout(contents.block)
    except Refusal as refusal:
        loading.accept(None)
        return [*loading.events, Consequence(REFUSES, str(refusal), loading.run, decides=loading.decides)]
    if layout is None and contents.block is not None:
        if not takes_integers(contents.block) or not any(tensor.fp8 for tensor in contents.tensors.values()):
            return None
        loading.accept(None)
        loading.take_codes_for_integers()
        return loading.events
    loading.accept(layout)
    loading.check_config()
    loading.check_class(layout)
    loading.build(layout)
    loading.load()
    loading.check_missing()
    return loading.events


class _Loading:
    """One pass of a loader over a folder."""

    def __init__(self, contents: Contents, server: Server) -> None:
        self.contents = contents
        self.server = server
        self.events: list[Consequence] = []
        self.slots: dict[str, Slot] = {}
        self.quantized: list[tuple[Linear, ...]] = []
        self.layout: Layout | None = None
        self.filled: set[str] = set()
        self.only = contents.files.only
        layers = [int(match[1]) for name in contents.stock.shapes if (match := _LAYER.search(name))]
        self._layers = max(layers, default=-1) + 1
        self._cut: dict[str, list[str]] = defaultdict(list)
        self.run = server.name == "vLLM" and contents.loaded_in_vllm
        self.decides = server.name == "vLLM" and contents.dense_text

    def _add(self, verdict: str, reason: str, warns: bool = False, seen: bool = True, fix: str = "") -> None:
        """Add an event; `seen`: vLLM was run on such a folder."""
        if self.only and verdict != OK:
            reason, fix = f"only {self.only} is read: {reason}", f"delete {self.only} if the other files hold the model"
        self.events.append(Consequence(verdict, reason, self.run and seen, warns, self.decides, fix))

    def accept(self, layout: Layout | None) -> None:
        """Add the event of a folder without problems."""
        if layout is not None and layout.weights_only:
            self.run = self.decides = False
        if layout is None or layout.kind == "none":
            self._add(OK, "names, shapes and dtypes are the model's")
        elif layout.block is not None:
            self._add(OK, "block kernels; on Blackwell scales are turned into powers of two while loading")
        elif layout.method == "fp8":
            self._add(OK, "AutoFP8's layout, one scale per tensor, from compute capability 8.9")
        else:
            self._add(OK, "compressed-tensors W8A8 FP8 from compute capability 8.9")

    def check_config(self) -> None:
        """Check the fields of config.json that a loader refuses, whatever the tensors are."""
        raw, family = self.contents.raw, str(self.contents.raw.get("model_type"))
        activation = getattr(self.contents.stock.model.config, "hidden_act", "silu")
        named = raw.get("architectures")
        model_class = named[0] if isinstance(named, list) and named else type(self.contents.stock.model).__name__
        if self.contents.dense_text and model_class in _ONLY_SILU and activation != "silu":
            fix = "serve it with transformers"
            self._add(REFUSES, f"its MLP of {family} takes only silu, and hidden_act is {activation!r}", fix=fix)
        if named:
            return
        # `get_config` fills in transformers' class without a head, e.g. LlamaModel.
        fix = "write the name of the model's class into architectures"
        if self.server.name != "vLLM":
            self._add(REFUSES, "the model's class is chosen by architectures", fix=fix, seen=False)
        elif self.contents.dense_text and family in _WITHOUT_ARCHITECTURES:
            self._add(OK, "the model's class is chosen by model_type", warns=True, seen=False)
        else:
            reason = "without architectures it is taken for an embedding model, which generates nothing"
            self._add(REFUSES, reason, fix=fix, seen=False)

    def check_class(self, layout: Layout | None) -> None:
        """Check that the class in architectures is one of the model's family."""
        name, stock = find_other_class(self.contents), self.contents.stock
        if name is None:
            return
        quantized = layout is not None and layout.kind != "none"
        verdict = judge_other_class(self.contents, self.server.name, name, quantized)
        reason = f"architectures names {name}, which is no class of model_type {stock.model.config.model_type!r}"
        fix = f'write "architectures": ["{type(stock.model).__name__}"]'
        self._add(verdict, reason, seen=False, fix=fix)

    def take_codes_for_integers(self) -> None:
        """Add the event of FP8 codes under a config of integers of 8 bits (`CompressedTensorsW8A8Int8`)."""
        fix = 'write "type": "float" and "format": "float-quantized"'
        self._add(GARBAGE, "weights have type int: FP8 codes are copied into int8 parameters as numbers", fix=fix)

    # The parameters --------------------------------------------------------------------------------------------------

    def build(self, layout: Layout | None) -> None:
        """Build the parameters of the model under a layout; None for a folder without quantization_config."""
        self.layout = layout
        stock = self.contents.stock
        self.slots = {name: Slot(tuple(shape)) for name, shape in stock.shapes.items()}
        for name, first in stock.tied_on_disk.items():
            if self.server.unties and (name in self.contents.tensors or self._unties_elsewhere(name)):
                self.slots[name] = Slot(tuple(stock.shapes[first]))
        for parts in self.contents.matrices:
            self._build_matrix(parts)
        head = stock.linears.get(stock.head or "")
        if layout is not None and head is not None and self._is_head_quantized(head):
            self._add_quantized((head,), layout)

    def _build_matrix(self, parts: tuple[Linear, ...]) -> None:
        if any(part.disk in self.contents.high_precision for part in parts):
            return
        for part in parts:
            if f"{part.disk}.weight" in self.slots or not part.expert:
                self.slots[f"{part.disk}.weight"] = Slot(part.shape, "values", _cut_dimension(part, parts))
        if self.layout is None:
            return
        skipped = self._skipped(parts)
        if any(skipped) and not all(skipped):
            self._add(REFUSES, "some parts of a fused matrix are quantized by the config and others are not")
        elif not any(skipped):
            self._add_quantized(parts, self.layout)

    def _skipped(self, parts: tuple[Linear, ...]) -> list[bool]:
        """Whether the config leaves each part of a matrix unquantized."""
        layout = self.layout
        assert layout is not None
        if layout.kind == "none" or not all(is_server_target(part, layout) for part in parts):
            return [True] * len(parts)
        parent, _, leaf = parts[0].disk.rpartition(".")
        if len(parts) > 1 and leaf in _FUSED_NAMES:
            name = f"{parent}.{_FUSED_NAMES[leaf]}"  # the name of the fused matrix itself is accepted, too
            if is_listed_for(self.server.name, Linear(name, name, (0, 0), parts[0].types), layout):
                return [True] * len(parts)
        return [is_listed_for(self.server.name, part, layout) for part in parts]

    def _is_head_quantized(self, head: Linear) -> bool:
        """vLLM quantizes the output projection only if a target of compressed-tensors names it."""
        layout = self.layout
        assert layout is not None
        if self.server.name != "vLLM" or layout.method != "compressed-tensors" or layout.kind == "none":
            return False
        return matches_target(head.disk, layout.targets, ()) and not matches_target(head.disk, layout.skipped, ())

    def _add_quantized(self, parts: tuple[Linear, ...], layout: Layout) -> None:
        self.quantized.append(parts)
        self._check_blocks(parts, layout)
        for part in parts:
            cut, weight = _cut_dimension(part, parts), f"{part.disk}.weight"
            self.slots[weight] = Slot(part.shape, "codes", cut)
            grid = layout.grid(*part.shape)
            # A scale for each row has no columns to cut.
            self.slots[weight + layout.scale_suffix] = Slot(
                grid, "scale", None if cut == 1 and grid[1:] == (1,) else cut
            )
            if layout.static:
                self.slots[f"{part.disk}.input_scale"] = Slot((), "scale")

    def _check_blocks(self, parts: tuple[Linear, ...], layout: Layout) -> None:
        if layout.block is None:
            return
        rows, columns = layout.block
        ragged = any(part.shape[0] % rows for part in parts[:-1])
        if ragged and layout.method == "fp8" and self.server.name == "vLLM" and _fits_grid(parts, rows):
            self._add(GARBAGE, "blocks of fused layers of these widths do not line up: their scales are misplaced")
        elif ragged:
            self._add(REFUSES, "blocks of fused layers of these widths would not line up")
        if any(part.shape[1] % columns for part in parts):
            # The kernel of the test decodes, and takes any K. This is what CUDA kernels do.
            reason = "CUDA kernels quantize activations in whole groups along K"
            self.events.append(Consequence(REFUSES, reason))

    # The tensors -----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Copy every tensor of the files into its parameter."""
        files = self.contents.files
        if self.only:
            self._add(OK, f"only {self.only} is read, which transformers leaves out", warns=True, seen=False)
        elif files.others:
            self._add(OK, f"files that transformers leaves out are read, too: {files.others[0]}", warns=True)
        for problem in files.problems:
            self._add(problem.verdict, problem.reason, fix=problem.fix)
        for on_disk, tensor in self.contents.tensors.items():
            known = self.contents.names.get(on_disk, on_disk)
            if known != on_disk and self.contents.dense_text:
                known = on_disk  # other names of a text model are transformers' own aliases
            slot = self.slots.get(known)
            if slot is None:
                if not self._fill_fused(on_disk, tensor):
                    self._unexpected(on_disk)
                continue
            self.filled.add(known)
            stacked = known in self.contents.stock.stacked and len(tensor.shape) == 3
            if not slot.takes(tensor.shape) and not stacked:
                self._add(REFUSES, f"the shape of {on_disk!r} differs from the parameter's")
                continue
            if slot.shape and tensor.shape != slot.shape and not stacked:
                self._cut[known.rpartition(".layers.")[2].partition(".")[2] or known].append(known)
            self._check_dtype(known, slot, tensor)
        self._check_cut()

    def _fill_fused(self, name: str, tensor: FileTensor) -> bool:
        """Whether a tensor belongs to a whole fused matrix, which vLLM splits: its weight, bias or scales, where one
        scale of the whole matrix serves all parts."""
        layer, _, suffix = name.rpartition(".")
        parent, _, leaf = layer.rpartition(".")
        parts = next((parts for parts in _FUSED_PARTS if leaf == _FUSED_NAMES[parts[0]]), ())
        names = [f"{parent}.{part}.{suffix}" for part in parts]
        slots = [self.slots[part] for part in names if part in self.slots]
        if self.server.name != "vLLM" or not slots or len(slots) < len(parts):
            return False
        # Rows, and the scales of rows and blocks, are split by the parts' sizes (`_load_fused_module_from_checkpoint`).
        if slots[0].shape:
            wanted = (sum(slot.shape[0] for slot in slots), *slots[0].shape[1:])
            if tensor.shape != wanted:
                return False
        elif not slots[0].takes(tensor.shape):
            return False
        self._check_dtype(name, slots[0], tensor)
        self.filled |= set(names)
        if self.layout is not None and self.layout.kind != "channel":
            self._add(OK, f"{name!r} is split into its parts", warns=True, seen=False)
        return True

    def _unexpected(self, name: str) -> None:
        stock, quantized = self.contents.stock, self.layout is not None
        parent, _, leaf = name.rpartition(".")
        if _DROPPED.search(name) or name in stock.tied_on_disk or stock.is_ignored(name):
            return
        if quantized and leaf == "g_idx":
            return
        if is_cache_scale(name):
            self._cache_scale(name)
            return
        if leaf == "bias" and self.contents.module_exists(parent):
            return
        layer = _LAYER.search(name)
        if self.server.refuses_names:
            self._add(REFUSES, f"there is no parameter for {name!r}")
        elif layer is not None and int(layer[1]) >= self._layers:
            self._add(GARBAGE, "layers beyond num_hidden_layers are left out, without a word", seen=False)
        elif any(
            parent.endswith(f".{part}") for parts in _FUSED_PARTS for part in parts
        ) and self.contents.module_exists(parent):
            self._add(REFUSES, f"a fused matrix has no parameter for {name!r}", seen=False)
        else:
            self._add(OK, f"{name!r} is left out, with a warning", warns=True, seen=False)

    def _cache_scale(self, name: str) -> None:
        if not self.server.refuses_names:
            return
        if self.layout is None:
            self._add(REFUSES, f"without a quantization_config there is no parameter for {name!r}")
        elif not _READ_CACHE_SCALES[self.layout.method].search(name):
            self._add(REFUSES, f"there is no parameter for {name!r}")
        elif math.prod(self.contents.tensors[name].shape) != 1:
            self._add(REFUSES, f"{name!r} is not one number")

    def _check_dtype(self, name: str, slot: Slot, tensor: FileTensor) -> None:
        if slot.role == "scale":
            if tensor.dtype not in (*_HIGH, "F8_E8M0"):
                self._add(GARBAGE, f"scales of dtype {tensor.dtype} are copied as numbers: {name!r}")
        elif slot.role == "values":
            # A cast with a scale uses the upper half of the range, as one of the values themselves rarely does.
            if tensor.fp8 and self._all(tensor, lambda rows: rows.float().abs() <= torch.finfo(rows.dtype).max / 2):
                self._add(OK, f"{name!r} is in FP8, and read as it is", warns=True)
            elif tensor.fp8:
                self._add(GARBAGE, f"the codes of {name!r} are taken for values, without their scales")
            elif tensor.dtype not in _HIGH:
                self._add(GARBAGE, f"values of dtype {tensor.dtype} are copied as numbers: {name!r}")
        elif tensor.dtype in ("U8", "I8"):
            self._add(GARBAGE, f"codes of dtype {tensor.dtype} are copied as numbers: {name!r}")
        elif tensor.dtype == "F8_E5M2" and not self._all(tensor, lambda rows: rows.float().abs() <= E4M3.max):
            self._add(GARBAGE, f"codes of {name!r} beyond 448 are cast to E4M3, which ends there")
        elif not tensor.fp8 and not self._all(tensor, lambda rows: rows.to(E4M3.dtype).to(rows.dtype) == rows):
            self._add(GARBAGE, f"the values of {name!r} are cast to FP8 as they are, and multiplied by scales")

    def _all(self, tensor: FileTensor, holds: Callable[[Tensor], Tensor]) -> bool:
        """Whether something holds of all values; False without reading values (`quick`)."""
        return not self.contents.quick and all(bool(holds(rows).all()) for _, rows in tensor.rows())

    def _check_cut(self) -> None:
        """Report tensors of which only the beginning is used: all of a kind means that config.json is wrong."""
        for names in self._cut.values():
            leaf = names[0].rpartition(".layers.")[2].partition(".")[2]
            same = [name for name in self.slots if leaf and name.endswith(f".{leaf}")]
            is_config = len(names) >= len(same)
            reason = f"{names[0]!r} is larger than its parameter, and only its beginning is used"
            self._add(GARBAGE if is_config else OK, reason, warns=not is_config)

    # What is missing -------------------------------------------------------------------------------------------------

    def check_missing(self) -> None:
        """Report parameters that no tensor has filled."""
        scales = {name for name, slot in self.slots.items() if slot.role == "scale"}
        for name, slot in self.slots.items():
            if name in self.filled or name in scales or self._is_stacked_apart(name):
                continue
            if self.layout is None and self.server.asks_for_norms and not self.contents.is_linear(name):
                self._add(REFUSES, f"{name!r} is missing")
            elif slot.role == "values" and not self.contents.is_linear(name):
                self._add(GARBAGE, f"{name!r} is missing and stays at ones, without a word")
            elif name in self.contents.stock.tied_on_disk and self.contents.files.head is not None:
                self._report_untied(*self.contents.files.head)
            else:
                self._add(GARBAGE, f"{name!r} is missing and stays uninitialized, without a word")
        for parts in self.quantized:
            self._check_missing_scales(parts)

    def _unties_elsewhere(self, name: str) -> bool:
        """Whether a file holds the name of a tied head, which makes the server build the head, and is not read."""
        return name.endswith("lm_head.weight") and self.contents.files.head is not None

    def _report_untied(self, file: str, tensor: str) -> None:
        reason = f"{tensor!r} in {file} unties the head, which no file that is read fills: it stays uninitialized"
        self._add(GARBAGE, reason, fix=f"move {file} to a separate folder")

    def _is_stacked_apart(self, name: str) -> bool:
        """Whether a parameter of experts is on disk in its other form, stacked or one by one."""
        stacked = self.contents.stock.stacked
        if name in stacked:
            return any(single in self.filled for single in stacked[name])
        return any(name in singles and whole in self.filled for whole, singles in stacked.items())

    def _check_missing_scales(self, parts: tuple[Linear, ...]) -> None:
        layout = self.layout
        assert layout is not None
        names = [f"{part.disk}.weight{layout.scale_suffix}" for part in parts]
        missing = [name for name in names if name not in self.filled]
        if missing and not self._is_last_tensor_scale(names, missing, layout):
            self._add(GARBAGE, f"{missing[0]!r} is missing and stays uninitialized, without a word")
        inputs = [f"{part.disk}.input_scale" for part in parts]
        if layout.static and not any(name in self.filled for name in inputs):
            self._add(GARBAGE, f"{inputs[0]!r} is missing and stays uninitialized, without a word")

    def _is_last_tensor_scale(self, names: list[str], missing: list[str], layout: Layout) -> bool:
        """Whether the missing scale is the last of a fused matrix with a scale per tensor: its first scale is then used
        for all of it (`requantize_with_max_scale`), which is right if the parts share one."""
        if layout.kind != "tensor" or self.server.name != "vLLM" or len(names) < 2 or missing != names[-1:]:
            return False
        tensors = [self.contents.tensors[name] for name in names[:-1]]
        return len({float(tensor.read().float().flatten()[0]) for tensor in tensors}) == 1


def _fits_grid(parts: tuple[Linear, ...], rows: int) -> bool:
    """Whether the scales of the parts of a fused matrix fit into its grid where vLLM puts them: each at its first row
    divided by the block's, rounded up (`adjust_block_scale_shard`)."""
    total, first = -(-sum(part.shape[0] for part in parts) // rows), 0
    for part in parts:
        if -(-first // rows) + -(-part.shape[0] // rows) > total:
            return False
        first += part.shape[0]
    return True


def _cut_dimension(part: Linear, parts: tuple[Linear, ...]) -> int | None:
    """The dimension in which servers take a slice of a layer's tensors, as of one rank of several."""
    if part.expert:
        return None
    if len(parts) > 1:
        return 0
    return 1 if part.disk.rpartition(".")[2] in ("o_proj", "down_proj") else None
