"""State dicts with FP8 weights as codes and scales: plain tensors by name, as in FP8 checkpoints.

``model.state_dict()`` is stock, in high precision: it has the masters of FP8 weights, which may be written to (call
``fp8.invalidate`` afterwards). :func:`fp8_state_dict` has codes instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.weights.cache import CachesWeights
from octavo.fp8.weights.fp8_rows import Shards, dequantize, gather, shard_mesh, unpack_gathered
from octavo.fp8.weights.fp8_tensor import Fp8Weight, Source
from octavo.fp8.weights.frozen import codes_of_frozen, frozen_from_codes, is_frozen
from octavo.fp8.weights.shards import distribute_like, full, is_whole, local_of, reshard


def fp8_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with FP8 weights as codes and whole tensors on all ranks. Collective call.

    ``<name>``: float8_e4m3fn codes of the forward's cast, in the weight's shape (experts as [E, N, K], however they are
    stored). The dequantization multipliers, ``value ~ code * scale``, are ``<name>_scale_inv`` [N / 128, K / 128] for
    blocks of 128 x 128, the name in DeepSeek's checkpoints, else ``<name>_scale`` [row blocks, column blocks]; experts
    have a leading dimension. Everything else is as in ``state_dict()``.
    """
    weights = dict(_fp8_weights(model))
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name not in weights:
            out[name] = full(value)
            continue
        q = forward_codes(weights[name])
        out[name] = q.data.contiguous()
        out[f"{name}{_scale_suffix(q.spec)}"] = q.scale.contiguous()
    return out


def load_fp8_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict of :func:`fp8_state_dict`: masters become the dequantized codes, rounded to their dtype; frozen
    weights take codes and scales as they are.

    Raises ValueError for codes without scales, for codes of weights that are not FP8 here or are frozen in other
    blocks, and for values of a frozen weight, before anything changes; and the errors of ``load_state_dict`` for names
    and shapes.
    """
    weights = dict(_fp8_weights(model))
    plain = dict(state)
    replaced: list[tuple[Fp8Weight, Fp8Weight]] = []
    for name, weight in weights.items():
        need = local_of(weight).source.needs[0]
        if name not in state:
            continue  # load_state_dict reports it
        if state[name].dtype is not need.spec.fmt.dtype:
            if is_frozen(weight) and not is_frozen(state[name]):
                raise ValueError(
                    f"{name} is a frozen FP8 weight of shape {list(weight.shape)}, but the state dict contains "
                    f"{state[name].dtype} for it. Load codes and scales (fp8.fp8_state_dict), or call "
                    "fp8.dequantize_weights(model) first."
                )
            continue  # in high precision
        scale = plain.pop(name + _scale_suffix(need.spec), None)
        if scale is None:
            raise ValueError(
                f"{name} has FP8 codes without the scales {name}{_scale_suffix(need.spec)} of its recipe "
                f"({need.spec}). Load a state dict of fp8_state_dict for the same plan, or one in high "
                "precision."
            )
        device = weight.device
        if is_frozen(weight):
            replaced.append((local_of(weight), _local_frozen_rows(state[name], scale, weight, name)))
            plain[name] = weight.detach()
            continue
        values = dequantize(Quantized(state[name].to(device), scale.to(device), need.spec), need, weight.dtype)
        plain[name] = values.mT if need.transposed else values
    left = [name for name, value in plain.items() if value.is_floating_point() and value.element_size() == 1]
    if left:  # load_state_dict would copy them as values, and report the error afterwards
        raise ValueError(
            f"{left[0]} ({len(left)} in all) has FP8 codes, but that weight of the model is not FP8. First apply "
            "the plan, with param=True, of the model that the state dict was taken from."
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in list(plain.items()):
        target = parameters.get(name)
        if not is_whole(target) and is_whole(value):
            plain[name] = distribute_like(value, target)
    model.load_state_dict(plain)
    for weight, codes in replaced:
        weight.copy_from(codes)


def _local_frozen_rows(codes: Tensor, scale: Tensor, weight: Any, name: str) -> Fp8Weight:
    """Return this rank's rows of a frozen weight from the codes and scales of all rows."""
    local = local_of(weight)
    need, on = local.source.needs[0], local.device
    try:
        whole: Any = frozen_from_codes(codes.to(on), scale.to(on), need.spec, weight.dtype, need.transposed).detach()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if whole.shape != weight.shape:
        raise ValueError(f"{name} has shape {list(weight.shape)}, but {list(whole.shape)} in the state dict.")
    if not is_whole(weight):
        mesh = shard_mesh(weight)
        begin, end = Shards(whole.shape[0], mesh.size(), mesh.get_local_rank()).here
        whole = whole[begin:end]
    assert isinstance(whole, Fp8Weight)
    return whole


def _fp8_weights(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the FP8 weights of a model with all their names; sharded ones as DTensors."""
    reshard(model)
    for prefix, module in model.named_modules():
        layers = module._weight_caches() if isinstance(module, CachesWeights) else ()
        for name, value in module._parameters.items():
            if is_frozen(value) or (name in layers and isinstance(local_of(value), Fp8Weight)):
                yield f"{prefix}.{name}" if prefix else name, value


def forward_codes(weight: Any) -> Quantized:
    """Return the codes of a whole FP8 weight for the forward, in the orientation of its GEMM. Collective call for a
    sharded one."""
    source: Source = local_of(weight).source
    if is_whole(weight):
        return codes_of_frozen(weight) if is_frozen(weight) else source.needs[0].cast(weight.values())
    mesh = shard_mesh(weight)
    outputs = tuple(gather(part, mesh) for part in local_of(weight).wire(mesh))
    return unpack_gathered(outputs, source.needs, source.whole, Shards(source.whole[0], mesh.size(), 0), None)[0]


def _scale_suffix(spec: CastSpec) -> str:
    return "_scale_inv" if spec.block == (128, 128) else "_scale"
