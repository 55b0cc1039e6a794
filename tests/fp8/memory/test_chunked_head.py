"""The head that returns losses inside a model's own forward: equal to the loss of its logits in every family, and
refused where the model changes what its head returns."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlavaOnevisionConfig,
    PhiConfig,
    Qwen3MoeConfig,
)

from octavo.fp8.dense.swap import unswap
from octavo.fp8.memory.chunked_head import ChunkedHead, chunk_head
from octavo.fp8.memory.chunked_loss import linear_cross_entropy
from octavo.models.tiny.configs import CHECKPOINTS, tiny_config

IGNORE = -100


def tiny(family: str) -> nn.Module:
    config = tiny_config(family)
    torch.manual_seed(0)
    multimodal = hasattr(config, "vision_config")
    return (AutoModelForImageTextToText if multimodal else AutoModelForCausalLM).from_config(config)


def asked(seed=0):
    g = torch.Generator().manual_seed(seed)
    ids, target = torch.randint(3, 400, (2, 9), generator=g), torch.randint(0, 512, (2, 3), generator=g)
    target[0, 1] = IGNORE
    return {"input_ids": ids, "logits_to_keep": torch.tensor([2, 3, 7]), "use_cache": False}, target


@pytest.mark.parametrize("family", [f for f in CHECKPOINTS if f != "qwen2_audio"])  # it takes no logits_to_keep
def test_supported_families_return_losses(family: str):
    model = tiny(family)
    inputs, target = asked()
    names = list(model.state_dict())
    want = plain_losses(model(**inputs).logits, target)
    want.sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    head = chunk_head(model)
    assert isinstance(head, ChunkedHead) and isinstance(head, nn.Linear) and list(model.state_dict()) == names
    with head.losses(target) as given:
        loss = given.checked_losses(model(**inputs).logits)
    torch.testing.assert_close(loss, want, rtol=2e-6, atol=4e-6)
    loss.sum().backward()
    assert grads.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=2e-6)


def plain_losses(logits: Tensor, target: Tensor, **options) -> Tensor:
    flat = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none", **options)
    return flat.view(target.shape)


def test_head_returns_logits_outside_context():
    model, (inputs, target) = tiny("qwen3"), asked()
    want = model(**inputs).logits
    head = chunk_head(model)
    assert torch.equal(model(**inputs).logits, want)
    with head.losses(target):
        assert model(**inputs).logits.shape == (2, 3)
    assert torch.equal(model(**inputs).logits, want)
    model.generate(torch.zeros(1, 2, dtype=torch.int64), max_new_tokens=2, do_sample=False)
    with pytest.raises(ZeroDivisionError), head.losses(target):
        raise ZeroDivisionError
    assert torch.equal(model(**inputs).logits, want)


def test_options_reach_the_loss():
    model, (inputs, target) = tiny("llama"), asked()
    logits = model(**inputs).logits
    want = plain_losses(logits, target, label_smoothing=0.1) + 0.01 * logits.logsumexp(-1) ** 2 * (target != IGNORE)
    with chunk_head(model).losses(target, label_smoothing=0.1, z_loss=0.01, chunk=1) as given:
        torch.testing.assert_close(given.checked_losses(model(**inputs).logits), want, rtol=2e-6, atol=4e-6)


def test_log_probabilities_and_entropy_at_a_temperature():
    model, (inputs, target) = tiny("qwen3_vl"), asked()
    logs = (model(**inputs).logits / 0.7).log_softmax(-1)
    known = target != IGNORE
    want = logs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * known
    with chunk_head(model).log_probs(target, temperature=0.7, entropy=True, chunk=1) as given:
        found = given.checked_losses(model(**inputs).logits)
    torch.testing.assert_close(found, want, rtol=2e-6, atol=4e-6)
    torch.testing.assert_close(given.entropy, -(logs.exp() * logs).sum(-1) * known, rtol=2e-6, atol=4e-6)
    with chunk_head(model).log_probs(target) as given:
        given.checked_losses(model(**inputs).logits).sum().backward()
    assert given.entropy is None and model.get_output_embeddings().weight.grad is not None


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=30.0),
        CohereConfig(**SMALL, logit_scale=0.0625),
        GraniteConfig(**SMALL, logits_scaling=8.0),
    ],
    ids=lambda c: c.model_type,
)
def test_model_that_modifies_logits_is_rejected(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    reason = chunk_head(model)
    assert isinstance(reason, str) and "changes the logits after its head" in reason
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize(
    "config",
    [PhiConfig(**SMALL), Qwen3MoeConfig(**SMALL, output_router_logits=True), LlavaOnevisionConfig()],
    ids=lambda c: c.model_type,
)
def test_further_families_on_the_meta_device(config):
    with torch.device("meta"):
        multimodal = hasattr(config, "vision_config")
        model = (AutoModelForImageTextToText if multimodal else AutoModelForCausalLM).from_config(config)
    assert isinstance(chunk_head(model), ChunkedHead)


def test_fake_tensors_are_supported():
    with FakeTensorMode():
        model, (inputs, target) = tiny("qwen3"), asked()
        head = chunk_head(model)
        with head.losses(target) as given:
            loss = model(**inputs).logits
        given.checked_losses(loss).sum().backward()
    assert loss.shape == (2, 3) and model.lm_head.weight.grad.shape == model.lm_head.weight.shape


def test_modified_losses_are_detected_at_each_step():
    model, (inputs, target) = tiny("qwen3"), asked()
    head = chunk_head(model)
    for change in (lambda x: 2 * x, lambda x: x.mul_(2), lambda x: x[:, :2], lambda x: x.clone()):
        with head.losses(target) as given:
            logits = change(model(**inputs).logits)
        with pytest.raises(RuntimeError, match="Use full logits with this model"):
            given.checked_losses(logits)
    with head.losses(target) as given:
        pass
    with pytest.raises(RuntimeError, match="was not called"):
        given.checked_losses(torch.zeros(2, 3))


def test_misuse_is_reported():
    model, (inputs, target) = tiny("qwen3"), asked()
    head = chunk_head(model)
    with head.losses(target):
        model(**inputs)
        with pytest.raises(RuntimeError, match="called twice"):
            model(**inputs)
        with pytest.raises(RuntimeError, match="leave it first"), head.losses(target):
            pass
    why = r"targets \[2, 2\] and hidden states \[2, 3, 64\] do not match; pass one target per hidden state"
    with pytest.raises(ValueError, match=why), head.losses(target[:, :2]):
        model(**inputs)


def test_unsupported_heads_are_rejected_with_reason():
    model = tiny("qwen3")
    model.lm_head.register_forward_hook(lambda *_: None)
    assert "its head has hooks, or a forward of its own" in chunk_head(model)
    model = tiny("qwen3")
    model.lm_head = nn.Sequential(nn.Linear(64, 512))
    assert chunk_head(model) == "its head is a torch.nn.modules.container.Sequential, not a plain nn.Linear"
    assert "names no output embeddings" in chunk_head(nn.Linear(2, 2))
    assert "names no output embeddings" in chunk_head(tiny("qwen3").model)


def test_copies_pickles_and_unswap():
    model, (inputs, target) = tiny("qwen3"), asked()
    head = chunk_head(model)
    assert chunk_head(model) is head
    want = model(**inputs).logits
    with head.losses(target):
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(head))
    assert torch.equal(twin(**inputs).logits, want) and isinstance(again, ChunkedHead)
    with twin.lm_head.losses(target) as given:
        assert given.checked_losses(twin(**inputs).logits).shape == (2, 3)
    unswap(head)
    assert type(head) is nn.Linear and torch.equal(model(**inputs).logits, want)


def test_fsdp_gathers_weight_in_head_forward(mesh_of_one):
    model, (inputs, target) = tiny("llama"), asked()
    want = plain_losses(model(**inputs).logits, target)
    want.sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    head = chunk_head(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh_of_one)
    fully_shard(model, mesh=mesh_of_one)
    for _ in range(2):  # the second step meets weights that were resharded
        model.zero_grad(set_to_none=True)
        with head.losses(target) as given:
            loss = given.checked_losses(model(**inputs).logits)
        torch.testing.assert_close(loss, want, rtol=2e-6, atol=4e-6)
        loss.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), grads[name], rtol=1e-4, atol=2e-6)
    with pytest.raises(TypeError, match="where FSDP has gathered"):
        linear_cross_entropy(torch.zeros(2, 64), head.weight, target[0, :2])
