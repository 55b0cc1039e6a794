"""Inside fp8.batch_invariant, log-probabilities of padded batches equal those of a prompt followed by one token at a
time, bit for bit, in any batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MptConfig, MptForCausalLM

from octavo import adapters, fp8, models
from octavo.config import LoraSection
from octavo.fp8.invariance.attention import attention
from octavo.fp8.measuring import invariant
from octavo.fp8.memory import chunk_head
from octavo.models.forward.paged import position_axes
from octavo.models.tiny import tiny
from octavo.models.tiny.parts import PATCH

TEMPERATURE = 0.7


@dataclass
class Sequence:
    ids: Tensor  # [T]
    prompt: int  # how many of them
    kinds: Tensor  # [T], 1 where a token stands for an image
    pixels: Tensor | None
    grids: list[tuple[int, int, int]]


def sequences(config) -> list[Sequence]:
    """Return sequences of 2 to 150 tokens, some with one or two images if the model takes images."""
    generator = torch.Generator().manual_seed(1)
    image = getattr(config, "image_token_id", None)
    result = []
    for tokens, new, image_sizes in ((2, 1, ()), (20, 7, ((4, 6),)), (125, 15, ((8, 8), (2, 4))), (17, 12, ((6, 2),))):
        ids, kinds, sizes = [], [], image_sizes if image is not None else ()
        for height, width in sizes:
            count = height * width // 4
            ids += [config.vision_start_token_id, *[image] * count, config.vision_end_token_id]
            kinds += [0, *[1] * count, 0]
        ids += torch.randint(5, 200, (tokens,), generator=generator).tolist()
        kinds += [0] * (len(ids) - len(kinds))
        pixels = [torch.randn(h * w, 3 * 2 * PATCH**2, generator=generator) for h, w in sizes]
        grids = [(1, h, w) for h, w in sizes]
        result.append(
            Sequence(
                torch.tensor(ids), len(ids) - new, torch.tensor(kinds), torch.cat(pixels) if pixels else None, grids
            )
        )
    return result


def image_inputs(batch_sequences: list[Sequence], dtype: torch.dtype) -> dict[str, Tensor]:
    pixels = [s.pixels for s in batch_sequences if s.pixels is not None]
    if not pixels:
        return {}
    grid = torch.tensor([g for s in batch_sequences for g in s.grids])
    return {"pixel_values": torch.cat(pixels).to(dtype), "image_grid_thw": grid}


def padded(
    batch_sequences: list[Sequence], left: bool, dtype: torch.dtype, vision: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Return (a padded batch, the start of each sequence in its row)."""
    longest = max(len(s.ids) for s in batch_sequences)
    batch = {
        name: torch.zeros(len(batch_sequences), longest, dtype=torch.int64)
        for name in ("input_ids", "attention_mask", "kinds")
    }
    starts = torch.tensor([longest - len(s.ids) if left else 0 for s in batch_sequences])
    for row, (s, start) in enumerate(zip(batch_sequences, starts.tolist(), strict=True)):
        inside = slice(start, start + len(s.ids))
        for name, values in (("input_ids", s.ids), ("attention_mask", 1), ("kinds", s.kinds)):
            batch[name][row, inside] = values
    kinds = batch.pop("kinds")
    extra = image_inputs(batch_sequences, dtype)
    if vision:
        extra["mm_token_type_ids"] = kinds
    return batch | extra, starts


def batched_forward(
    model, batch_sequences: list[Sequence], left: bool = False, head: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Return log-probabilities of the tokens of each sequence except the first, and entropies, by one forward with
    gradients."""
    batch, starts = padded(batch_sequences, left, dtype_of(model), models.describe(model).has_vision)
    ids, longest = batch["input_ids"], batch["input_ids"].shape[1]
    if left and not models.describe(model).has_vision:
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    keep = torch.arange(longest - 1)
    target = torch.where(batch["attention_mask"][:, 1:] == 1, ids[:, 1:], -100)
    model.train()
    if head:
        chunked = chunk_head(model)
        with chunked.log_probs(target, TEMPERATURE, entropy=True) as request:
            logs = request.checked_losses(model(**batch, logits_to_keep=keep, use_cache=False).logits)
        entropy = request.entropy
    else:
        logits = model(**batch, use_cache=False).logits[:, :-1]
        logs, entropy = fp8.log_probs(logits, target, temperature=TEMPERATURE, entropy=True)
    (logs.sum() + entropy.sum()).backward()
    spans = [
        (i, slice(s, s + len(x.ids) - 1)) for i, (s, x) in enumerate(zip(starts.tolist(), batch_sequences, strict=True))
    ]
    return [(logs[i, span].detach(), entropy[i, span].detach()) for i, span in spans]


def dtype_of(model) -> torch.dtype:
    """Return the dtype that the model computes in."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


class Cache:
    """Keys and values of every sequence in full, and the (sequence, position) of each new token."""

    def __init__(self, model, count: int, longest: int) -> None:
        shape = models.cache_shape(model.config)
        size = (shape.layers, count, shape.heads, longest, shape.dim)
        self.keys, self.values = (torch.zeros(size, dtype=dtype_of(model)) for _ in range(2))
        self.who, self.at = np.zeros(0, int), np.zeros(0, int)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend with q [T, H, D]: the prompt of one sequence, or one token from each of several sequences."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.who, :, self.at], values[self.who, :, self.at] = k.to(keys.dtype), v.to(keys.dtype)
        rows, at = np.unique(self.who), torch.from_numpy(self.at)
        if len(rows) == 1:
            q, at = q.transpose(0, 1)[None], at[None]
        else:
            rows, q, at = self.who, q[:, :, None], at[:, None]
        out = attention(q, keys[rows], values[rows], positions=at, scale=scale)
        return out[0].transpose(0, 1) if len(out) == 1 and out.shape[2] > 1 else out[:, :, 0]


@torch.no_grad()
def step_by_step(model, batch_sequences: list[Sequence]) -> list[tuple[Tensor, Tensor]]:
    """Decode all sequences together, one token at a time. Returns log-probabilities and entropies of the tokens after
    each prompt."""
    family, longest = models.describe(model), max(len(s.ids) for s in batch_sequences)
    cache, axes = Cache(model, len(batch_sequences), longest), position_axes(model, family)
    results: list[list[tuple[Tensor, Tensor]]] = [[] for _ in batch_sequences]
    model.eval()

    def forward(ids: Tensor, positions: Tensor, keep: Tensor, **images: Tensor) -> Tensor:
        where = positions[:, None] if axes == 3 else positions
        return model(input_ids=ids[None], position_ids=where, logits_to_keep=keep, use_cache=False, **images).logits[0]

    def record(logits: Tensor, who: list[int], at: list[int]) -> None:
        target = torch.stack([batch_sequences[i].ids[t + 1] for i, t in zip(who, at, strict=True)])
        for i, *pair in zip(who, *fp8.log_probs(logits, target, temperature=TEMPERATURE, entropy=True), strict=True):
            results[i].append(tuple(pair))

    offsets = []
    with models.replace_attention(model, family, cache.attend):
        for i, s in enumerate(batch_sequences):
            grid = torch.tensor(s.grids) if s.grids else None
            positions, after = models.prompt_positions(model, family, s.ids[: s.prompt], s.kinds[: s.prompt], grid)
            offsets.append(after - s.prompt)
            cache.who, cache.at = np.full(s.prompt, i), np.arange(s.prompt)
            last = torch.tensor([s.prompt - 1])
            record(
                forward(s.ids[: s.prompt], positions, last, **image_inputs([s], dtype_of(model))), [i], [s.prompt - 1]
            )
        for step in range(longest):
            who = [i for i, s in enumerate(batch_sequences) if s.prompt + step + 1 < len(s.ids)]
            if not who:
                break
            at = [batch_sequences[i].prompt + step for i in who]
            cache.who, cache.at = np.array(who), np.array(at)
            ids = torch.stack([batch_sequences[i].ids[t] for i, t in zip(who, at, strict=True)])
            positions = torch.tensor([[t + offsets[i] for i, t in zip(who, at, strict=True)]]).expand(axes, -1)
            record(forward(ids, positions, torch.arange(len(who))), who, at)
    return [tuple(torch.stack(part) for part in zip(*pairs, strict=True)) for pairs in results]


def count_differences(model, left: bool = False, head: bool = False) -> int:
    """Count values after the prompts that are not bit-identical."""
    batch_sequences = sequences(model.config)
    trained, rolled = (
        batched_forward(model, batch_sequences, left, head),
        step_by_step(model, batch_sequences[::-1])[::-1],
    )
    pairs = [
        (training[s.prompt - 1 :], rollout)
        for s, train_pair, rollout_pair in zip(batch_sequences, trained, rolled, strict=True)
        for training, rollout in zip(train_pair, rollout_pair, strict=True)
    ]
    assert all(a.shape == b.shape and torch.isfinite(a).all() for a, b in pairs)
    return sum(int((a != b).sum()) for a, b in pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    cache = {}

    def get(family: str):
        if family not in cache:
            cache[family] = tiny.write(family, tmp_path_factory.mktemp("invariant") / family, size="mini")
        return cache[family]

    return get


CASES = {
    "text": ("qwen3", torch.float32, None, False),
    "text BF16": ("qwen3", torch.bfloat16, None, False),
    "text blockwise BF16": ("llama", torch.bfloat16, "blockwise", False),
    "VLM": ("qwen3_vl", torch.float32, None, False),
    "VLM blockwise": ("qwen3_vl", torch.float32, "blockwise", False),
    "VLM rowwise BF16": ("qwen3_vl", torch.bfloat16, "rowwise", False),
    "VLM mxfp8": ("qwen3_vl", torch.float32, "mxfp8", False),
    "VLM autocast": ("qwen3_vl", torch.float32, "rowwise", False),
    "MoE autocast": ("qwen3_moe", torch.float32, None, False),
    "windows": ("qwen2_5_vl", torch.float32, "blockwise", False),
    "MoE": ("qwen3_moe", torch.float32, None, False),
    "MoE blockwise BF16": ("qwen3_moe", torch.bfloat16, "blockwise", False),
    "VLM MoE rowwise": ("qwen3_vl_moe", torch.float32, "rowwise", False),
    "LoRA": ("qwen3_vl", torch.bfloat16, None, True),
    "LoRA on FP8": ("qwen3_vl", torch.bfloat16, "blockwise", True),
    "LoRA on FP8 experts": ("qwen3_vl_moe", torch.bfloat16, "blockwise", True),
}


FAST_CASES = ("VLM blockwise", "MoE", "LoRA on FP8")
TWO_THREAD_CASES = (
    "text BF16",
    "VLM",
    "VLM blockwise",
    "VLM autocast",
    "windows",
    "MoE blockwise BF16",
    "LoRA on FP8 experts",
)
"""Also tested with two threads: each dtype, tower and kind of experts."""
RUNS = [
    pytest.param(case, threads, marks=() if threads == 1 and case in FAST_CASES else pytest.mark.long)
    for case in CASES
    for threads in ((1, 2) if case in TWO_THREAD_CASES else (1,))
]


def load_case(folder, family: str, dtype: torch.dtype, recipe: str | None, lora: bool):
    if lora and recipe is not None:
        model = models.load(folder(family), dtype=dtype, load_in_fp8=recipe)
    else:
        model = models.load(folder(family), dtype=dtype)
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, recipe))
    if lora:
        adapters.attach(model, models.describe(model), LoraSection(rank=3, alpha=6, dtype="fp32"))
        with torch.no_grad():
            for name, parameter in adapters.adapter_parameters(model):
                if "lora_B" in name:
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    return model


@pytest.mark.parametrize(("case", "threads"), RUNS)
def test_rollouts_match_training_bit_for_bit(folder, case: str, threads: int):
    model = load_case(folder, *CASES[case])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in case):
            assert count_differences(model), "the case must differ outside of the mode"
            with fp8.batch_invariant(model):
                assert [count_differences(model), count_differences(model, head=True)] == [0, 0]
                if not models.describe(model).has_vision:
                    assert count_differences(model, left=True) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("saved", ["bf16", "fp8"])
def test_fused_blocks_with_recomputation_and_health(folder, saved: str):
    model = models.load(folder("qwen3"), dtype=torch.bfloat16)
    fp8.apply(model, fp8.plan(model, fp8.Policy("blockwise", activations=saved)))
    assert saved == "fp8" or not any(fusion.reason for fusion in fp8.fuse(model))
    fp8.activation_checkpointing(models.describe(model).layers(model), "selective")
    with fp8.batch_invariant(model):
        assert count_differences(model) == 0
        with fp8.health():  # health metrics run the layers separately
            batch_sequences = sequences(model.config)
            with_health = batched_forward(model, batch_sequences)
        assert all(
            torch.equal(a[0], b[0]) for a, b in zip(with_health, batched_forward(model, batch_sequences), strict=True)
        )


def move_to_fake_gpu(model, backend: str) -> None:
    """Move the weights of the layers to a GPU that does not exist."""
    fp8.apply(model, fp8.plan(model, fp8.Policy("rowwise", backend=backend)))
    with FakeTensorMode():
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, device="cuda")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: fp8.apply(m, fp8.plan(m, "tensorwise")), r"q_proj runs by tensorwise.*share a scale between rows"),
        (lambda m: fp8.apply(m, fp8.plan(m, "delayed")), r"q_proj runs by delayed.*amax histories"),
        (lambda m: fp8.apply(m, fp8.plan(m, fp8.Policy("rowwise", backend="triton"))), "runs on triton.*reference"),
        (lambda m: m.model.layers[0].compile(), r"layers\.0 is compiled.*train\.compile: false"),
        (lambda m: m.model.add_module("drop", torch.nn.Dropout(0.1)), r"model\.drop drops 0\.1.*lora\.dropout"),
        (lambda m: m.set_attn_implementation("eager"), r"computes attention by eager.*sdpa"),
        (lambda m: move_to_fake_gpu(m, "torch"), "q_proj runs on torch.*by the number of rows.*fp8.backend: triton"),
    ],
    ids=["tensorwise", "delayed", "backend", "compiled", "dropout", "eager", "gpu"],
)
def test_unsupported_models_are_rejected_by_name(folder, change, message: str):
    model = models.load(folder("qwen3"))
    assert fp8.why_not_batch_invariant(model) is None
    change(model)
    with pytest.raises(fp8.InvarianceError, match=message), fp8.batch_invariant(model):
        pass


def test_gpu_needs_triton(folder, monkeypatch):
    model = models.load(folder("qwen3"))
    move_to_fake_gpu(model, "triton")
    assert fp8.why_not_batch_invariant(model) is None
    monkeypatch.setattr(invariant, "why_not_rows", lambda device: "triton is not installed")
    with pytest.raises(fp8.InvarianceError, match="on cuda:0.*triton is not installed.*rl.invariant: false"):
        fp8.batch_invariant(model)


def test_model_with_custom_attention_is_rejected():
    model = MptForCausalLM(MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=16))
    with pytest.raises(fp8.InvarianceError, match="eager"):
        fp8.batch_invariant(model)
