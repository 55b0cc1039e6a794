"""`octavo export`: writes model folders in BF16 or FP8 that servers load.

    format        on disk                                             for
    bf16          values in BF16                                      everything
    fp8-block     DeepSeek's layout: codes, and `weight_scale_inv`    vLLM, SGLang, transformers, trainers
                  for blocks of 128 x 128; with ragged rows in
                  compressed-tensors (`Layout.quantization`)
    fp8-dynamic   compressed-tensors: one `weight_scale` per row      vLLM, SGLang, transformers; every shape
    fp8-tensor    compressed-tensors: one per tensor, shared by q, k  the same
                  and v and by gate and up

The export keeps the trained codes: if a weight has codes in the blocks of the format, they are written unchanged.
Otherwise the weight is cast with the format's own cast (`fp8.weights.FROZEN`), from the parameter if there is one, else
from the values of its codes; both cases are counted, with their error.

Values arrive one at a time and are written at once, so at most one group of matrices that share a scale is in memory.
The folder appears complete or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import fp8, models
from octavo.base import atomic_write, target_folder
from octavo.base.byte_size import format_bytes
from octavo.base.safe_read import printable
from octavo.base.wording import count_noun
from octavo.checkpoint import compat
from octavo.checkpoint.checksums import MARKER, NOTE_DIGEST, note_digest, read_note, sha256
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.export import layout as layouts
from octavo.checkpoint.export.carried import RANDOM, Carried, plan_carried
from octavo.checkpoint.export.files import Shards, nbytes
from octavo.checkpoint.export.layout import FORMATS, Layout
from octavo.checkpoint.export.names import Matrix
from octavo.checkpoint.export.result import ExportResult, TensorStats
from octavo.checkpoint.export.values import TrainedWeight, Value, dequantize_codes, regrid, select_matrix
from octavo.fp8.arithmetic import quantize, quantize_with_scale, scale_from_amax
from octavo.fp8.policy import template
from octavo.fp8.weights import FROZEN
from octavo.models.folder.chat import check_template
from octavo.models.folder.folder import TIED, check_companions, companions, find_file
from octavo.models.folder.quantization import to_config
from octavo.models.processors import stop_tokens
from octavo.models.processors.companions import write_companions
from octavo.models.weights.shards import has_weights

MAX_FILE_BYTES = 5 * 10**9  # bytes of a file, the default of transformers
_MIN_AMAX = 2.0**-100  # below this amax a block has the scale 1 (docs/numerics.md)

Progress = Callable[[int, int, str], None]  # bytes done, total bytes, name of the tensor written last
#: called with (parameter, expert or None, rows or None, value): for FP8 the codes [N, K] of these rows of the parameter
#: (of that expert), as they are written; else the whole parameter, as it is stored, in the dtype that is written
OnWrite = Callable[[str, int | None, tuple[int, int] | None, Tensor | fp8.Quantized], None]


def export(
    values: Iterable[tuple[str, Value]],
    source: str | Path,
    directory: str | Path,
    format: str,
    *,
    include: Iterable[str] = (),
    largest: int = MAX_FILE_BYTES,
    device: torch.device | str | None = None,
    random: bool = False,
    untied: bool | None = None,
    protect: Iterable[str | Path] = (),
    log: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda done, total, name: None,
    written: OnWrite = lambda name, slot, rows, value: None,
) -> ExportResult:
    """Write a model folder.

    Args:
        values: (name, value) of every parameter and persistent buffer of the stock model, once, in any order; tied
            ones once or twice. A value is a tensor in high precision, `fp8.Quantized` codes ([N, K], or [E, N, K] for
            experts), or :class:`TrainedWeight`. They are consumed one at a time.
        source: the model folder that provides configuration, tokenizer and processor; one that is stored in three
            folders is exported as one, because servers read that form.
        directory: a new or empty directory, or an earlier export, which is replaced if it holds nothing else.
        format: bf16, fp8-block, fp8-dynamic or fp8-tensor.
        include: components that are written in FP8 in addition to the foundation.
        largest: maximum bytes of a file; a larger tensor gets a separate file.
        device: device of the casts; by default the device of the values.
        random: training began with random weights, so tensors that the model does not load are not copied.
        untied: the weights that config.json ties are separate in the model of the values: both are written, with
            `tie_word_embeddings: false`. None: as they are in `source` (`octavo.models.weights.ties`).
        protect: folders that the values come from, which must not be replaced.
        log: called with messages about the result.
        progress: called with bytes done, total bytes, and the tensor written last.
        written: called with each value before it is written (:data:`OnWrite`); an exception ends the export, which
            then leaves no files.

    Raises CheckpointError for a directory that must not be replaced, values of another model, a NaN or an infinity
    (with the tensor's name), and values that the format cannot hold; ModelError for the source or a full disk. After an
    error `directory` is unchanged.
    """
    source, target = Path(source), Path(directory)
    check_target(target, [source, *(Path(p) for p in protect)])
    models.read_config(source)  # raises for a wrong config.json, before other files are blamed for it
    check_companions(source, copied=True)  # before the weights, which may take an hour
    if find_file(source, "tokenizer.json").is_file() and any(
        file.match("chat_template*") for file in companions(source)
    ):
        check_template(models.load_tokenizer(source), source)
    stop_tokens.missing_end_token(source)  # refuses the tokenizer of another model
    plan = layouts.plan_layout(source, format, include, untied)
    untied = plan.drops_ties(source)
    carried = Carried(source)
    if has_weights(source):
        carried = plan_carried(source, plan.names.model, plan.quantization, plan.fused, RANDOM if random else None)
    tensors = (*plan.tensors(), *carried.tensors())
    with atomic_write.new_folder(target, CheckpointError) as folder, Shards(folder, tensors, largest) as shards:
        _check_free_space(folder, target, shards.total)
        writer = _Writer(plan, source, shards, None if device is None else torch.device(device), progress, written)
        for name, value in values:
            writer.add(name, value)
        writer.finish()
        for name, value in carried.read():
            shards.write(name, value)
        shards.finish()
        quantization = None if plan.quantization is None else to_config(carried.add_skipped(plan.quantization))
        end = write_companions(source, folder, torch.bfloat16, quantization, carried.config, untied)
        skipped = plan.skipped if plan.kind else {}
        done = ExportResult(
            target, format, plan.family, tuple(shards.names), shards.total, writer.kinds, plan.layers,
            None if plan.quantization is None else plan.quantization.method, dict(Counter(skipped.values())),
            _names_by_reason(skipped), dict(writer.opened), end, carried,
        )  # fmt: skip
        shards.close()
        sums = {file.name: sha256(file) for file in sorted(folder.iterdir())}
        document = {"octavo_export": 1, **done.to_json(), "directory": target.name, "sha256": sums}
        document[NOTE_DIGEST] = note_digest(json.loads(json.dumps(document)))
        (folder / MARKER).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        atomic_write.sync_tree(folder)
        check_target(target, [])  # again, because files may have been added during the export
    for sentence in done.sentences():
        log(sentence)
    if untied:
        log(f"config.json has {TIED}: false: the model has two different weights where {source} announces one")
    return done


def _names_by_reason(skipped: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return reason -> names of layers with numbers replaced, each once, from layer -> reason."""
    names: dict[str, dict[str, None]] = {}
    for layer, reason in skipped.items():
        names.setdefault(reason, {})[template(layer)] = None
    return {reason: tuple(layers) for reason, layers in names.items()}


def check_target(target: Path, sources: Iterable[Path]) -> None:
    """Refuse a directory that an export must not replace. Raises CheckpointError."""
    target_folder.check_target(target, CheckpointError)
    for source in sources:
        replaced, exported = target.resolve(), source.resolve()
        if replaced == exported or replaced in exported.parents:
            what = "the folder" if replaced == exported else "a folder above the one"
            raise CheckpointError(f"{target} is {what} that is exported ({source}); choose another directory")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; choose a directory that is new, empty, or an earlier export")
    if target_folder.is_free(target):
        return
    if not (target / MARKER).is_file():
        names = ", ".join(map(printable, target_folder.contents(target)[:3]))
        raise CheckpointError(
            f"{target} is not empty ({names}) and is not an earlier export: it has no {MARKER}. Choose a new "
            "directory, or delete this one; nothing is overwritten"
        )
    if foreign := _changed_entries(target):
        raise CheckpointError(
            f"{target} is an earlier export, which would be replaced, but {', '.join(foreign[:3])} in it was "
            "added or changed. Move it away, or choose another directory; nothing is deleted"
        )


def _changed_entries(target: Path) -> list[str]:
    """Return the entries of an earlier export's folder that were added or changed since. Weights, and files of an
    export without checksums, are compared only by name."""
    note = read_note(target)
    sums: Mapping[str, str] = note["sha256"]
    wrote = {MARKER, *(sums or compat.exported_names(note, target))}
    changed = []
    for entry in (target / name for name in target_folder.contents(target)):
        shard = entry.name.endswith(".safetensors")
        edited = not shard and entry.name in sums and entry.is_file() and sha256(entry) != sums[entry.name]
        if entry.name not in wrote or entry.is_symlink() or entry.is_dir() or edited:
            changed.append(printable(entry.name))
    return changed


def _check_free_space(directory: Path, target: Path, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < size:
        raise CheckpointError(
            f"{target} needs {format_bytes(size)}, but {format_bytes(free)} are free on that disk. Nothing was "
            "written; free some space, or export to another disk"
        )


class _Writer:
    """Takes values, converts them to the tensors of the layout, and writes these."""

    def __init__(
        self,
        plan: Layout,
        source: Path,
        shards: Shards,
        device: torch.device | None,
        progress: Progress,
        written: OnWrite,
    ) -> None:
        self.plan, self.source, self.shards, self.device = plan, source, shards, device
        self.progress, self.written = progress, written
        self.spec = None if plan.kind is None else FROZEN[plan.kind]
        self.kinds: dict[str, TensorStats] = {}
        self.opened: Counter[str] = Counter()
        self.done = 0
        self._seen: set[str] = set()
        self._sharing = Counter(m.shares for ms in plan.matrices.values() for m in ms)
        self._waiting: dict[str, list[tuple[Matrix, Tensor | None, Any]]] = {}
        self._together: dict[str, Tensor] = {}  # parameters that wait for others that they are converted with

    def add(self, name: str, value: Value) -> None:
        if name in self.plan.names.tied:
            return
        if name not in self.plan.together or name in self._seen:
            why = "was passed twice" if name in self._seen else f"is unknown to the model of {self.source}"
            raise CheckpointError(f"{name} {why}: the weights do not match the source's model")
        self._seen.add(name)
        self._check(name, value)
        if name not in self.plan.matrices:
            self._write_plain(name, value)
            return
        for m in self.plan.matrices[name]:
            values, codes = select_matrix(value, m.slot, m.rows, name in self.plan.stored)
            if self.plan.kind != "tensor":
                self._write_fp8(m, values, codes, None)
                continue
            together = self._waiting.setdefault(m.shares, [])
            together.append((m, values, codes))
            if len(together) == self._sharing[m.shares]:
                self._write_shared(self._waiting.pop(m.shares))

    def finish(self) -> None:
        if missing := [name for name in self.plan.together if name not in self._seen]:
            raise CheckpointError(
                f"no values for {count_noun(len(missing), 'parameter')} of the model, first {missing[0]}: the weights "
                f"do not match the model of {self.source}"
            )

    def _check(self, name: str, value: Value) -> None:
        """Raise CheckpointError for a value of another shape than the parameter's, and for NaN or infinity."""
        shape = tuple(self.plan.names.weights[name].shape)
        values = value.values if isinstance(value, TrainedWeight) else value
        if isinstance(values, Tensor):
            actual, wanted = tuple(values.shape), shape
            bad = values.is_meta or (values.is_floating_point() and not bool(torch.isfinite(values).all()))
        else:
            actual = tuple(values.data.shape)
            wanted = (*shape[:-2], shape[-1], shape[-2]) if name in self.plan.stored else shape
            scale = values.scale.float()
            nan = (values.data.view(torch.uint8) & 0x7F) == 0x7F  # E4M3: all bits but the sign set
            bad = bool(nan.any()) or not bool((torch.isfinite(scale) & (scale > 0)).all())
        if actual != wanted:
            raise CheckpointError(f"{name} has shape {list(actual)}, but the model of {self.source} has {list(wanted)}")
        if bad:
            plain = isinstance(values, Tensor)
            what = "NaN or an infinity" if plain else "a NaN code, or a scale that is not finite and positive"
            raise CheckpointError(
                f"{name} holds {what}; nothing was written. Such a model returns NaN: export an earlier "
                "checkpoint (--step), or look in metrics.jsonl for the step that broke it"
            )

    # High precision -------------------------------------------------------------------------------------------------

    def _write_plain(self, name: str, value: Value) -> None:
        if not isinstance(value, Tensor):
            self.opened[self.plan.component_of(name)] += 1
        group = self.plan.together[name]
        high = self._high_precision(name, value)
        if high.is_floating_point():
            high = high.to(self.plan.names.dtype(name))
            if not bool(torch.isfinite(high).all()):
                raise CheckpointError(f"{name} has values beyond {str(high.dtype)[6:]}, which would become infinite")
        self.written(name, None, None, high)
        self._together[name] = high
        if any(other not in self._together for other in group):
            return
        for disk, tensor in self.plan.names.to_disk({n: self._together.pop(n) for n in group}).items():
            self._write(disk, tensor, disk).count += 1

    def _high_precision(self, name: str, value: Value) -> Tensor:
        """Return the values of a parameter as it is stored; codes are dequantized."""
        if isinstance(value, TrainedWeight):
            return value.values
        if isinstance(value, Tensor):
            return value
        if value.data.dim() == 2:
            return dequantize_codes(value)
        each = [dequantize_codes(fp8.Quantized(d, s, value.spec)) for d, s in zip(value.data, value.scale, strict=True)]
        values = torch.stack([e.bfloat16() for e in each])
        return values.mT if name in self.plan.stored else values

    # FP8 ------------------------------------------------------------------------------------------------------------

    def _write_shared(self, together: list[tuple[Matrix, Tensor | None, Any]]) -> None:
        """Write matrices that share one scale: the largest of their separate scales."""
        assert self.spec is not None
        group_scales = []
        for _, values, codes in together:
            reused = None if codes is None else regrid(codes, self.spec)
            if reused is not None:
                group_scales.append(None if _is_zero(reused) else reused.scale.reshape(()).float())
                continue
            amax = (values if values is not None else dequantize_codes(codes)).abs().max().float()
            group_scales.append(None if float(amax) < _MIN_AMAX else scale_from_amax(amax, self.spec))
        scales = [scale.cpu() for scale in group_scales if scale is not None]
        shared = torch.stack(scales).max() if scales else torch.tensor(1.0)
        for m, values, codes in together:
            self._write_fp8(m, values, codes, shared)

    def _write_fp8(self, m: Matrix, values: Tensor | None, codes: Any, scale: Tensor | None) -> None:
        """Write one matrix. ``scale``: the shared scale of its group, or None for a separate one."""
        assert self.spec is not None and self.plan.quantization is not None
        reused = None if codes is None else regrid(codes, self.spec)
        if reused is not None and scale is not None and not (float(reused.scale) == float(scale) or _is_zero(reused)):
            reused = None  # its codes belong to another scale
        if self.device is not None:
            values = None if values is None else values.to(self.device)
        reference = values if values is not None else dequantize_codes(codes) if reused is None else None
        if reused is not None:
            q, how = (reused if scale is None else reused._replace(scale=scale.reshape(1, 1))), "kept"
        else:
            assert reference is not None
            if scale is None:
                q = quantize(reference, self.spec)
            else:
                q = quantize_with_scale(reference, scale.to(reference.device).reshape(1, 1), self.spec)
            how = "cast" if codes is None else "refit" if values is not None else "recast"
        self.written(m.parameter, m.slot, m.rows, q)
        kind = self._write(m.name, q.data, m.name)
        scales = q.scale.float().reshape(self.plan.scale_shape(m))
        self._write(m.name + self.plan.quantization.scale_suffix, scales, m.name)
        kind.count, kind.fp8 = kind.count + 2, True
        setattr(kind, how, getattr(kind, how) + 1)
        if reference is not None:
            relative, largest = _cast_error(q, reference)
            kind.relative, kind.largest = max(kind.relative or 0.0, relative), max(kind.largest or 0.0, largest)

    def _write(self, name: str, tensor: Tensor, like: str) -> TensorStats:
        self.shards.write(name, tensor)
        size = nbytes(tensor.dtype, tuple(tensor.shape))
        kind = self.kinds.setdefault(template(like), TensorStats())
        kind.bytes += size
        self.done += size
        self.progress(self.done, self.shards.total, name)
        return kind


def _is_zero(q: fp8.Quantized) -> bool:
    return not bool((q.data.view(torch.uint8) & 0x7F).any())


def _cast_error(q: fp8.Quantized, values: Tensor) -> tuple[float, float]:
    """Return (|written - value| / |value| in norms, largest error / largest value); both are 0 for a zero tensor."""
    values = values.float()
    error = dequantize_codes(q).to(values.device) - values
    norm, amax = float(torch.linalg.vector_norm(values)), float(values.abs().max())
    if not amax:
        return 0.0, 0.0
    return float(torch.linalg.vector_norm(error)) / norm, float(error.abs().max()) / amax


__all__ = ["FORMATS", "MAX_FILE_BYTES", "MARKER", "ExportResult", "TensorStats", "check_target", "export"]
