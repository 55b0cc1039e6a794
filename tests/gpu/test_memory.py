"""Allocated GPU memory against counted and predicted bytes, for a layer of an 8B model and a step of a 1B model."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from octavo import fp8, models
from octavo.fp8.blocks import grouped_attention
from octavo.fp8.memory import chunked_loss
from octavo.fp8.memory.accounting import count_saved
from octavo.fp8.optim.in_backward import UpdateInBackward

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = "cuda"
KIB, MIB = 1 << 10, 1 << 20
LAYER = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
BILLION = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}


def qwen3(sizes: dict[str, int], layers: int, vocabulary: int, activations: str) -> nn.Module:
    """A Qwen3 of random weights in BF16, its linear layers FP8, its attention without repeated heads."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **sizes, head_dim=128, num_hidden_layers=layers, vocab_size=vocabulary, tie_word_embeddings=False
    )
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    described = models.describe(model)
    fp8.apply(model, fp8.plan(model, fp8.Policy(activations=activations), described.components))
    models.use_attention(model, grouped_attention)
    return model.train()


def requested() -> int:
    """Bytes of live tensors, without what the allocator adds."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def hidden(model: nn.Module, ids: Tensor) -> Tensor:
    return model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize(("activations", "most"), [("bf16", 300), ("fp8", 72)])
def test_layer_of_8b_model_saves_counted_bytes(activations: str, most: int) -> None:
    """At most 72 KiB a token with activations in FP8. The allocator adds less than 1 MiB to a tensor."""
    tokens = 8192
    model = qwen3(LAYER, 1, 1024, activations)
    layer = model.model.layers[0]
    ids = torch.randint(0, 1024, (1, tokens), device=DEVICE)
    hidden(model, ids).float().sum().backward()  # codes of weights, workspaces of GEMMs
    model.zero_grad()
    gc.collect()
    results: list[tuple[int, int]] = []

    def note(*_: object) -> None:
        results.append((requested(), torch.cuda.memory_allocated()))

    handles = [layer.register_forward_pre_hook(note), layer.register_forward_hook(note)]
    out = hidden(model, ids)
    for handle in handles:
        handle.remove()
    output = tokens * LAYER["hidden_size"] * 2  # not saved by the layer
    asked, saved = (results[1][i] - results[0][i] - output for i in (0, 1))
    del out
    with count_saved(model, [("layer", layer)]) as accountant:
        out = hidden(model, ids)
    report = accountant.report()
    counted = report.by_block["layer"]
    tensors = sum(row.block == "layer" for row in report.rows)
    print(f"{activations}: {asked / tokens / KIB:.2f} KiB a token asked for, {saved / tokens / KIB:.2f} held, "
          f"{counted / tokens / KIB:.2f} counted, {tensors} tensors")  # fmt: skip
    assert asked == pytest.approx(counted, rel=0.01)
    assert counted <= most * KIB * tokens and asked <= most * KIB * tokens
    assert saved <= most * KIB * tokens + tensors * MIB
    del out


def test_peak_memory_is_sum_of_kinds() -> None:
    """0.94 B parameters of 4.06 bytes (bf16+sr, FP8 states), updated in backward, activations in FP8, no logits."""
    vocabulary, rows, length = 32_000, 2, 2048
    model = qwen3(BILLION, 16, vocabulary, "fp8")
    optimizer = fp8.AdamW(model.parameters(), lr=1e-5, states="fp8", master="bf16+sr")
    updating = UpdateInBackward(optimizer, model)
    ids = torch.randint(0, vocabulary, (rows, length + 1))
    target = ids[:, 1:]

    def loss() -> Tensor:
        h = hidden(model, ids[:, :-1].to(DEVICE))
        return fp8.linear_cross_entropy(h, model.lm_head.weight, target).mean()

    def step() -> float:
        results = loss()
        done = updating.run(lambda retain: results.backward(retain_graph=retain), clip=1.0)
        assert done.applied
        optimizer.zero_grad(set_to_none=True)
        return float(results.detach())

    first = step()  # allocates states and codes
    with count_saved(model, models.describe(model).layers(model)) as accountant:
        results = loss()
    activations = accountant.report().total
    del results
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    standing = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    last = step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()

    count = sum(p.numel() for p in model.parameters())
    tokens, wide = rows * length, BILLION["intermediate_size"]
    chunk = min(chunked_loss._ELEMENTS, tokens * vocabulary)
    outer, inner = 2 * vocabulary * BILLION["hidden_size"], 2 * wide * BILLION["hidden_size"]
    in_loss = chunk * 12 + 4 * tokens * BILLION["hidden_size"] + outer
    in_blocks = tokens * wide * 12 + inner
    kinds = {
        "weights": 2 * count,
        "optimizer": sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values()),
        "codes": fp8.weight_cache_bytes(model),
        "activations": activations,
        "workspace": max(in_loss, in_blocks),
    }
    print({kind: f"{size / MIB:.0f} MiB" for kind, size in kinds.items()}, f"peak {peak / MIB:.0f} MiB")
    assert kinds["optimizer"] < 2.07 * count and 0.9e9 < count < 1e9 and last < first
    still = kinds["weights"] + kinds["optimizer"] + kinds["codes"]
    assert standing == pytest.approx(still, rel=0.05)  # including workspaces of cuBLAS
    assert 0.9 * sum(kinds.values()) <= peak <= 1.05 * sum(kinds.values()) + 128 * MIB
