"""Custom attention functions in a Hugging Face model, through transformers' registry.

    models.use_attention(model, fp8.blocks.grouped_attention)
    models.use_attention(model, kernel="cudnn")          torch's attention, with this kernel where supported
    models.use_kernel(model, "varlen", "image_encoder")  all images of a batch in one call

The function replaces ``sdpa`` and receives the same masks (sliding windows are part of them), in the text and the
vision part, and once for each sample of a packed row (:mod:`octavo.models.forward.packed`). Vision towers of the
Qwen-VL families call their attention once for each image, without a mask. Calls that the function does not support use
stock attention: forwards without gradient, paged caches, position biases, and queries whose length differs from the
keys' (decoding). Slopes of ALiBi (`alibi_slopes`, :mod:`octavo.models.attention.alibi`) are passed only with packed
rows, and apply within each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from octavo.models.attention import segments
from octavo.models.errors import ModelError

STOCK = "sdpa"
Attention = Callable[..., Tensor]
"""``(q, k, v, mask, *, scale, is_causal, dropout)`` -> [B, H, T, D]: q [B, H, T, D], k and v with fewer heads."""


KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""torch's kernels of ``sdpa``, in order of fallback; math supports every input."""

PACKAGES = {"flash_attention_3": is_flash_attn_3_available, "flash_attention_2": is_flash_attn_2_available}
"""transformers' names for kernels of other packages -> function that checks whether the package is installed. These
kernels run rows of different lengths without padding."""

VARLEN = "varlen"
FLEX = "flex"  # torch's flex attention for all samples of a pack, called through transformers
IMAGES = "octavo_flash_images"  # towers make a single call for all images only if the name contains "flash"
_kernels: dict[str, str | None] = {}  # registered name -> kernel


def prefer_kernel(kernel: str | None) -> AbstractContextManager[object]:
    """Return a context in which torch computes attention by this kernel, with the others of :data:`KERNELS` as
    fallback."""
    if kernel not in KERNELS:
        return nullcontext()
    others = [] if kernel == "math" else [backend for name, backend in KERNELS.items() if name != kernel]
    return sdpa_kernel([KERNELS[kernel], *others], set_priority=True)


def use_attention(
    model: PreTrainedModel, attention: Attention | None = None, kernel: str | None = None, component: str | None = None
) -> str:
    """Replace the attention of a model, or of one of its components (``foundation``, ``image_encoder``).

    ``attention``: the function, or None for torch's. ``kernel``: the kernel that torch uses, or None for the kernel of
    an earlier call or torch's choice. Returns the name under which it is registered.

    A tower that processes all images in one call is left unchanged. The change is not saved in ``config.json``.
    ``model.set_attn_implementation("sdpa")`` undoes it.

    Raises:
        ModelError: a part of the model does not use sdpa (custom kernels, or eager).
    """
    names: dict[int, str] = {}
    parts = [(path, part) for path, part in _parts(model, component) if part.config._attn_implementation != IMAGES]
    for path, part in parts:
        current = part.config._attn_implementation
        if id(part.config) in names:  # modules share configuration objects, which hold the name
            continue
        if current != STOCK and current not in _kernels:
            raise ModelError(
                f"{path or type(model).__name__} uses attention {current!r}, but only {STOCK!r} can be replaced "
                f"by {kernel or (STOCK if attention is None else attention.__name__)}. Load the model with "
                f"attn_implementation={STOCK!r}, or leave its attention as it is"
            )
        names[id(part.config)] = _register(attention, kernel or _kernels.get(current))
    _set(model, names)
    if unchanged := [
        path or type(model).__name__ for path, p in parts if p.config._attn_implementation != names[id(p.config)]
    ]:
        raise ModelError(
            f"{', '.join(unchanged)} of {type(model).__name__} cannot use a different attention function in this "
            "version of transformers. Leave its attention as it is"
        )
    return names.get(id(model.config)) or next(iter(names.values()))


def _parts(model: PreTrainedModel, component: str | None) -> list[tuple[str, PreTrainedModel]]:
    """Return the parts of a model, or of one component: a tower is recognized by its configuration. The audio tower is
    excluded: it keeps torch's attention, which supports its padding mask."""
    audio = getattr(model.config, "audio_config", None)
    parts = [
        (path, m)
        for path, m in model.named_modules()
        if isinstance(m, PreTrainedModel) and (audio is None or m.config is not audio)
    ]
    tower = getattr(model.config, "vision_config", None)
    return [
        (path, m) for path, m in parts if component is None or (m.config is tower) == (component == "image_encoder")
    ]


def _register(attention: Attention | None, kernel: str | None) -> str:
    """Register an attention function with transformers; returns its name."""
    # A number replaces the kernel's name, because transformers treats every name with "flash" as one of its kernels.
    number = [] if kernel is None else [str([*KERNELS, FLEX].index(kernel))]
    name = "_".join(["octavo", STOCK if attention is None else attention.__name__, *number])
    _kernels[name] = kernel
    ALL_ATTENTION_FUNCTIONS.register(name, _transformers_attention(attention, kernel))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, segments.make_mask)
    return name


def _set(model: PreTrainedModel, names: Mapping[int, str]) -> None:
    """Set the attention of configurations; ``names``: id of a configuration -> name. Others are not changed."""
    subs = {key: sub for key in model.config.sub_configs if (sub := getattr(model.config, key, None)) is not None}
    wanted = {key: names.get(id(sub), sub._attn_implementation) for key, sub in subs.items()}
    model.set_attn_implementation({"": names.get(id(model.config), model.config._attn_implementation), **wanted})


def uses_octavo_attention(model: nn.Module) -> bool:
    """Return whether a model or its decoder computes attention by a function that :func:`use_attention` registered."""
    return cast(PreTrainedConfig, model.config)._attn_implementation in _kernels


@contextmanager
def disable_masks(model: PreTrainedModel) -> Iterator[None]:
    """Context in which no part of a model builds a mask or inspects positions to decide whether it needs one: all rows
    have the same length, and attention is causal by itself. Raises ModelError for layers with a window, which needs a
    mask."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values()
    kinds = {kind for config in configs for kind in getattr(config, "layer_types", None) or ()}
    if windows := sorted(kinds - {"full_attention"}):
        raise ModelError(f"{type(model).__name__} has layers of type {', '.join(windows)}, which need a mask")
    original = [(config, config._attn_implementation) for config in configs]
    if unregistered := [name for _, name in original if name not in ALL_ATTENTION_FUNCTIONS]:
        raise ModelError(f"{type(model).__name__} uses attention {unregistered[0]!r}, which does not support is_causal")
    for config, name in original:
        unmasked = f"octavo_unmasked_{name}"  # transformers builds masks only for names in its registry of masks
        ALL_ATTENTION_FUNCTIONS.register(unmasked, ALL_ATTENTION_FUNCTIONS[name])
        config._attn_implementation = unmasked
    try:
        yield
    finally:
        for config, name in original:
            config._attn_implementation = name


def available_kernels() -> tuple[str, ...]:
    """Return the available kernels: torch's and the kernels of installed packages."""
    return (*KERNELS, *(name for name, is_available in PACKAGES.items() if is_available()))


def use_kernel(model: PreTrainedModel, kernel: str, component: str | None = None) -> None:
    """Select the attention kernel of a model or of one component: a kernel of torch, of a package, or ``eager``.
    ``varlen`` is for the vision tower (packs use it by default), ``flex`` only for packs.

    Raises ModelError as :func:`use_attention` and for a kernel that the component does not support, and the error of
    transformers for a package that is not installed."""
    if not _parts(model, component):
        raise ModelError(f"{type(model).__name__} has no {component}")
    if kernel in KERNELS:
        use_attention(model, kernel=kernel, component=component)
    elif kernel == FLEX:
        use_attention(model, kernel=FLEX, component="foundation")
    elif kernel == STOCK:
        _set(model, {id(part.config): STOCK for _, part in _parts(model, component)})
    elif kernel == VARLEN:
        if component != "foundation":
            _use_images(model)
    elif component is None:
        model.set_attn_implementation(kernel)
    else:
        _set(model, {id(part.config): kernel for _, part in _parts(model, component)})


def _use_images(model: PreTrainedModel) -> None:
    """Let the vision tower compute attention for all images in one call."""
    tower: PreTrainedConfig | None = getattr(model.config, "vision_config", None)
    if tower is None or not hasattr(tower, "spatial_merge_size"):
        raise ModelError(f"{type(model).__name__} has no tower with images of different sizes, which varlen requires")
    ALL_ATTENTION_FUNCTIONS.register(IMAGES, _image_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMAGES, segments.make_mask)
    tower._attn_implementation = IMAGES  # set_attn_implementation looks for names with "flash" on the hub


def _image_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, cu_seq_lens_q: Tensor | None = None, max_length_q: int | Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} does not pass the ends of images in this version of transformers. Use "
            "model.attention: sdpa"
        )
    return segments.attend_images(query, key, value, cu_seq_lens_q, int(max_length_q), scaling, dropout), None


def attend(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute attention of q [B, H, T, D] over k and v [B, H_kv, T, D] with this kernel and without fallback (``sdpa``:
    with the kernel that torch chooses). Raises RuntimeError, or an error of the kernel's package, for inputs that the
    kernel does not support."""
    if kernel == VARLEN:
        if not segments.supports_varlen(q, v):
            raise RuntimeError(
                "flash attention for rows of several samples needs CUDA, a 16-bit dtype and a head dimension of at "
                f"most {segments.MAX_HEAD_DIM} that is a multiple of 8, got {q.device.type}, {q.dtype} and "
                f"{q.shape[-1]}"
            )
        edges = torch.tensor([0, q.shape[2]], dtype=torch.int32, device=q.device)
        return segments.varlen(q, k, v, edges, q.shape[2], None, causal)[None].transpose(1, 2)
    if kernel == FLEX:
        row = segments.Segments.from_edges((0, q.shape[2]), q.device)
        return _flex(SimpleNamespace(training=True), row, q, k, v, None).transpose(1, 2)
    if kernel in PACKAGES:
        if not PACKAGES[kernel]():
            raise RuntimeError(f"the package of {kernel} is not installed or does not support this machine")
        module = SimpleNamespace(is_causal=causal, config=SimpleNamespace(_attn_implementation=kernel))
        out: Tensor = ALL_ATTENTION_FUNCTIONS[kernel](module, q, k, v, None)[0]
        return out.transpose(1, 2)
    with nullcontext() if kernel == STOCK else sdpa_kernel(KERNELS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _flex(
    module: nn.Module | SimpleNamespace, row: segments.Segments, q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> Tensor:
    """Compute attention [1, T, H, D] of all spans of a packed row, by one call of flex attention."""
    out: Tensor = ALL_ATTENTION_FUNCTIONS["flex_attention"](module, q, k, v, row.blocks, scaling=scale)[0]
    return out


def _transformers_attention(
    attention: Attention | None, kernel: str | None = None
) -> Callable[..., tuple[Tensor, None]]:
    """Return an attention function with the arguments and results of transformers' registry: q, k, v [B, H, T, D] ->
    ([B, T, H, D], None)."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | segments.Segments | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        slopes: Tensor | None = kwargs.pop("alibi_slopes", None)
        special = [name for name in ("softcap", "position_bias", "cache", "s_aux") if kwargs.get(name) is not None]
        # Custom functions implement only a causal or masked softmax in training; stock attention handles everything
        # else.
        stock = attention is None or special or not is_grad_enabled()

        def run_stock(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool | None) -> tuple[Tensor, None]:
            heads_and_weights: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS[STOCK](
                module, q, k, v, mask, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
            )
            return heads_and_weights

        def run_custom(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
            assert attention is not None
            return attention(q, k, v, mask, scale=scaling, is_causal=causal, dropout=dropout)

        def attend_sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if slopes is not None:
                assert isinstance(attention_mask, segments.Segments)
                bias = attention_mask.bias(slopes, q.shape[2], k.shape[2], q.dtype)
                return run_stock(q, k, v, bias, False)[0].transpose(1, 2) if stock else run_custom(q, k, v, bias, False)
            if q.shape[2] < k.shape[2]:  # the last tokens of a sample: each attends to all earlier tokens and itself
                seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
                return run_stock(q, k, v, seen.tril(k.shape[2] - q.shape[2])[None, None], False)[0].transpose(1, 2)
            use_stock = stock or q.shape[2] == 1
            return run_stock(q, k, v, None, True)[0].transpose(1, 2) if use_stock else run_custom(q, k, v, None, True)

        with prefer_kernel(kernel):
            if isinstance(attention_mask, segments.Segments):
                if unsupported := [*special, *(["sliding_window"] if kwargs.get("sliding_window") else [])]:
                    raise ModelError(
                        f"{type(module).__name__} uses {unsupported[0]} in the attention of a packed row, which is not "
                        "computed sample by sample. Set data.packing: false"
                    )
                if slopes is not None and kernel == FLEX:
                    raise ModelError(f"{type(module).__name__} adds ALiBi's bias to scores, which Octavo does not pass "
                                     "to flex attention. Use another kernel (model.attention)")  # fmt: skip
                row = attention_mask
                flex = partial(_flex, module, row, scale=scaling) if kernel == FLEX else None
                allow_varlen = kernel is None and slopes is None
                return segments.attend(
                    row, query, key, value, scaling, dropout, attend_sample, allow_varlen, module, flex
                ), None
            if stock or query.shape[2] != key.shape[2] or query.shape[2] == 1:
                return run_stock(query, key, value, attention_mask, is_causal)
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            heads = run_custom(query, key, value, attention_mask, bool(causal) and attention_mask is None)
        return heads.transpose(1, 2).contiguous(), None

    return forward
