"""Models initialized from config.json by the rules of their family, from a seed, in any dtype."""

import pytest
import torch
from torch import nn

from octavo import models
from octavo.base.model_families import tiny_families
from octavo.models import ModelError
from octavo.models.tiny import tiny


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """`bare(family)`: a mini model folder without weights; and those that transformers' own initialisation of the whole
    model draws with seed 5."""
    created = {}

    def folder(family):
        if family not in created:
            path = tiny.write(family, tmp_path_factory.mktemp("bare") / family, size="mini")
            created[family] = path, whole(path)
            (path / "model.safetensors").unlink()
        return created[family]

    return folder


def whole(path):
    model = models.load(path)
    for tied, _ in getattr(model, "all_tied_weights_keys", {}).items():  # each is drawn before they are tied
        home, _, leaf = tied.rpartition(".")
        setattr(model.get_submodule(home), leaf, nn.Parameter(model.get_parameter(tied).detach().clone()))
    for one in (*model.modules(), *model.parameters(), *model.buffers()):
        one._is_hf_initialized = False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        torch.manual_seed(5)
        model.initialize_weights()
    model.tie_weights()
    return all_of(model)


def all_of(model):
    """Compares parameters and all buffers, including those that no folder contains."""
    return model.state_dict() | dict(model.named_buffers())


@pytest.mark.parametrize("family", tiny_families())
def test_weights_equal_those_of_transformers_initialization(bare, family):
    folder, wanted = bare(family)
    state = torch.random.get_rng_state()
    model = models.init_model(folder, seed=5)
    assert torch.equal(torch.random.get_rng_state(), state) and not model.training
    actual = all_of(model)
    assert actual.keys() == wanted.keys() and all(torch.equal(actual[name], wanted[name]) for name in wanted)
    assert model.generation_config.eos_token_id == model.config.get_text_config().eos_token_id
    other = models.init_model(folder, seed=6).state_dict()
    assert any(not torch.equal(other[name], wanted[name]) for name in wanted)


def test_bf16_and_split_weights_have_the_same_values(bare):
    folder, wanted = bare("qwen3_vl")
    low = models.init_model(folder, torch.bfloat16, seed=5)
    assert all(torch.equal(p, wanted[name].bfloat16()) for name, p in low.named_parameters())
    assert all(buffer.dtype == torch.float32 for _, buffer in low.named_buffers())
    assert low.config.dtype == low.config.text_config.dtype == torch.bfloat16
    high, lows = models.split_model(models.init_model(folder, seed=5), "cpu")
    assert {p.dtype for p in high.parameters()} == {torch.bfloat16} and set(lows) <= set(wanted) and lows


def test_standard_deviation_of_normal_weights(bare):
    model = models.init_model(bare("qwen3_vl")[0], seed=5, std=0.5)
    for part in (model.model.visual, model.model.language_model):
        spread = [float(p.detach().std()) for p in part.parameters() if p.dim() == 2 and p.numel() > 4000]
        assert spread and all(0.45 < one < 0.55 for one in spread)


def test_models_that_cannot_be_initialized_are_rejected(bare, tmp_path, monkeypatch):
    from transformers.models.qwen3_moe import modeling_qwen3_moe as module

    folder = bare("qwen3_moe")[0]
    with pytest.raises(ModelError, match="is not a folder"):
        models.init_model(tmp_path / "none")
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(
        text.replace("{", '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},', 1)
    )
    with pytest.raises(ModelError, match="FP8 weights .quantization_config.*Remove that entry"):
        models.init_model(folder)
    config.write_text(text)
    monkeypatch.setattr(module.Qwen3MoePreTrainedModel, "_init_weights", module.PreTrainedModel._init_weights)
    with pytest.raises(ModelError, match=r"draws no values for model.layers.0.mlp.*of 'qwen3_moe'"):
        models.init_model(folder)


def test_a_module_that_sets_weights_of_another_part_is_refused(bare, monkeypatch):
    from transformers.models.qwen3 import modeling_qwen3 as module

    folder, _ = bare("qwen3")  # made before the patch, because other tests compare its weights
    own = module.Qwen3PreTrainedModel._init_weights

    def reaches_down(self, of):
        own(self, of)
        if isinstance(of, module.Qwen3Model):
            torch.nn.init.zeros_(of.layers[0].mlp.down_proj.weight)

    monkeypatch.setattr(module.Qwen3PreTrainedModel, "_init_weights", reaches_down)
    with pytest.raises(
        ModelError,
        match="Qwen3Model initializes layers.0.mlp.down_proj.weight, which is in a different part of the model",
    ):
        models.init_model(folder)
