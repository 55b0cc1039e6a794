"""MPT: what it computes is what LLM-Foundry's fields say, written out here once more; stock transformers' where that
class reads a field at all."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MptConfig, MptForCausalLM

from octavo import fp8, models
from octavo.checkpoint import verify
from octavo.config import load_config_text
from octavo.fp8.blocks import grouped_attention
from octavo.models import ModelError
from octavo.models.custom import mpt
from octavo.models.forward import packed
from octavo.models.processors.processors import load_tokenizer
from octavo.models.tiny import tiny
from octavo.train.setup import planning

SIZES = {"d_model": 24, "n_heads": 3, "n_layers": 2, "max_seq_len": 16, "vocab_size": 40}


@dataclass(frozen=True)
class Reference:
    """Reference formulas of the decoder by names on disk, in fp64, without modules of Octavo or transformers."""

    state: dict[str, Tensor]
    heads: int
    learned: bool = True
    alibi: float | None = None
    clip: float | None = None
    qk: int | None = None  # the width that q and k are normed over
    scale: float | None = None
    logit_scale: float = 1.0
    act: dict = field(default_factory=dict)

    def __call__(self, ids: Tensor) -> Tensor:
        x = self.state["transformer.wte.weight"][ids]
        if self.learned:
            x = x + self.state["transformer.wpe.weight"][: len(ids)]
        for number in range(2):
            at = f"transformer.blocks.{number}"
            x = x + self.attention(self.norm(x, f"{at}.norm_1"), f"{at}.attn")
            inside = self.linear(self.norm(x, f"{at}.norm_2"), f"{at}.ffn.up_proj")
            x = x + self.linear(F.gelu(inside, **self.act), f"{at}.ffn.down_proj")
        return self.norm(x, "transformer.norm_f") @ self.state["transformer.wte.weight"].T * self.logit_scale

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return y * self.state[f"{name}.weight"] + self.state.get(f"{name}.bias", 0.0)

    def attention(self, x: Tensor, name: str) -> Tensor:
        length, width = x.shape
        dim = width // self.heads
        qkv = self.linear(x, f"{name}.Wqkv")
        if self.clip is not None:
            qkv = qkv.clip(-self.clip, self.clip)
        q, k, v = qkv.split(width, -1)
        if self.qk is not None:
            q, k = (
                self.norm(y.reshape(length, -1, self.qk), f"{name}.{leaf}").reshape(length, width)
                for y, leaf in ((q, "q_ln"), (k, "k_ln"))
            )
        out = []
        for head in range(self.heads):
            part = slice(head * dim, (head + 1) * dim)
            scores = q[:, part] @ k[:, part].T * (dim**-0.5 if self.scale is None else self.scale)
            if self.alibi is not None:
                power = 2 ** math.ceil(math.log2(self.heads))
                order = (
                    [*range(1, power + 1)] if power == self.heads else [*range(2, power + 1, 2), *range(1, power, 2)]
                )
                slope = 2 ** (-self.alibi * order[head] / power)
                scores = scores - slope * (torch.arange(length)[:, None] - torch.arange(length))
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            out.append(scores.softmax(-1) @ v[:, part])
        return self.linear(torch.cat(out, -1), f"{name}.out_proj")


def made(seed: int = 0, **fields) -> mpt.MPTForCausalLM:
    """A model in fp64 whose norms and biases differ from their initial values."""
    torch.manual_seed(seed)
    model = mpt.MPTForCausalLM(mpt.MPTConfig(**{**SIZES, **fields})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def logits(model, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0]


IDS = torch.tensor([3, 17, 5, 5, 39, 0, 22, 8, 11])
FEATURES = {
    "learned positions": ({}, {}),
    "no positions": ({"learned_pos_emb": False}, {"learned": False}),
    "alibi": ({"attn_config": {"alibi": True}}, {"learned": False, "alibi": 8}),
    "alibi_bias_max": ({"attn_config": {"alibi": True, "alibi_bias_max": 4}}, {"learned": False, "alibi": 4}),
    "clip_qkv": ({"attn_config": {"clip_qkv": 0.7}}, {"clip": 0.7}),
    "qk_ln": ({"attn_config": {"qk_ln": True}}, {"qk": 24}),
    "qk_gn": ({"attn_config": {"qk_gn": True}}, {"qk": 8}),
    "qk_ln after clip_qkv": ({"attn_config": {"qk_ln": True, "clip_qkv": 0.7}}, {"qk": 24, "clip": 0.7}),
    "softmax_scale": ({"attn_config": {"softmax_scale": 0.9}}, {"scale": 0.9}),
    "logit_scale": ({"logit_scale": 0.3}, {"logit_scale": 0.3}),
    "inv_sqrt_d_model": ({"logit_scale": "inv_sqrt_d_model"}, {"logit_scale": 24**-0.5}),
    "no_bias": ({"no_bias": True}, {}),
    "expansion_ratio": ({"expansion_ratio": 2}, {}),
    "te_ln_mlp": ({"ffn_config": {"ffn_type": "te_ln_mlp"}}, {"act": {"approximate": "tanh"}}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_each_field_matches_its_formula(name: str) -> None:
    fields, formula = FEATURES[name]
    model = made(**fields)
    actual = logits(model, IDS)
    state = dict(model.state_dict())
    torch.testing.assert_close(actual, Reference(state, 3, **formula)(IDS), rtol=1e-9, atol=1e-9)
    if formula:  # and without it there would be something else to see
        plain = {**dict.fromkeys(formula), "learned": "transformer.wpe.weight" in state, "act": {}, "logit_scale": 1.0}
        other = Reference(state, 3, **plain)(IDS)
        assert name == "no positions" or float((actual - other).abs().max()) > 1e-4
    biases = [key for key in state if key.endswith(".bias")]
    assert len(biases) == (0 if name == "no_bias" else 13 + 4 * ("qk" in formula))


@pytest.mark.parametrize(
    "fields",
    [{}, {"attn_config": {"clip_qkv": 0.05}}, {"attn_config": {"softmax_scale": 0.4}},
     {"n_heads": 4, "layer_norm_epsilon": 1e-3}],
    ids=["plain", "clip", "scale", "eps"],
)  # fmt: skip
def test_supported_fields_equal_stock_transformers(fields: dict, tmp_path: Path) -> None:
    """Left padding and a cache too; stock transformers reads the saved model as the same one."""
    torch.manual_seed(0)
    stock = MptForCausalLM(MptConfig(**{**SIZES, **fields, "initializer_range": 0.3})).eval()
    stock.save_pretrained(tmp_path / "stock")
    octavo_model = models.load(tmp_path / "stock")
    assert isinstance(octavo_model, mpt.MPTForCausalLM) and mpt.ignored_by_stock(octavo_model.config) == []
    ids, mask = torch.stack([IDS, IDS.flip(0)]), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        wanted, actual = (model(input_ids=ids, attention_mask=mask).logits for model in (stock, octavo_model))
    torch.testing.assert_close(actual[mask.bool()], wanted[mask.bool()], rtol=1e-5, atol=1e-5)
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(stock.generate(ids, **options), octavo_model.generate(ids, **options))
    octavo_model.save_pretrained(tmp_path / "ours")
    again = MptForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in stock.state_dict().items())
    torch.testing.assert_close(logits(again, IDS), logits(stock, IDS), rtol=0, atol=0)


@pytest.mark.parametrize("fields", [{}, {"attn_config": {"alibi": True}}], ids=["learned", "alibi"])
def test_a_cache_padding_and_eager_attention_change_nothing(fields: dict) -> None:
    model = made(**fields)
    wanted = logits(model, IDS)
    with torch.no_grad():
        first = model(input_ids=IDS[None, :6], use_cache=True)
        rest = model(input_ids=IDS[None, 6:], past_key_values=first.past_key_values, use_cache=True).logits[0]
        padded = torch.cat([torch.zeros(4, dtype=torch.int64), IDS])[None]
        mask = (torch.arange(13) >= 4).long()[None]
        behind = model(input_ids=padded, attention_mask=mask).logits[0, 4:]
        kept = model(input_ids=IDS[None], logits_to_keep=torch.tensor([1, 4])).logits[0]
    model.set_attn_implementation("eager")
    for actual, own in ((rest, wanted[6:]), (behind, wanted), (kept, wanted[[1, 4]]), (logits(model, IDS), wanted)):
        torch.testing.assert_close(actual, own, rtol=1e-4, atol=1e-5)  # eager's softmax is in fp32


@pytest.mark.parametrize("fields", [{}, {"attn_config": {"alibi": True}}], ids=["learned", "alibi"])
def test_samples_of_a_pack_are_separate_and_start_at_position_0(fields: dict) -> None:
    """A pack with more tokens than positions, but shorter samples; gradients too."""
    model = made(**fields)
    family = models.describe(model)
    edges = (0, 9, 10, 24, 26)
    ids = torch.arange(edges[-1])[None] * 7 % 40
    forms = packed.Packed(model, family)

    def parts() -> list[Tensor]:
        places = forms.positions(edges, ids)
        with forms.forward(edges, places):
            actual = model(input_ids=ids, position_ids=places, use_cache=False).logits
        return [actual[:, a:b] for a, b in pairwise(edges)]

    def apart() -> list[Tensor]:
        return [model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in pairwise(edges)]

    sides = []
    for forward in (parts, apart):
        model.zero_grad()
        actual = forward()
        sum(part.square().mean() for part in actual).backward()
        sides.append([part.detach() for part in actual] + [p.grad.clone() for p in model.parameters()])
    for one, other in zip(*sides, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_alibi_pack_with_memory_saving_attention(saved: Path) -> None:
    """Recomputed blocks, two packs at once, and grouped attention instead of torch's."""
    model = made(attn_config={"alibi": True}).float().train()
    family = models.describe(model)
    ids = torch.arange(21)[None]

    def grads() -> dict[str, Tensor]:
        forms = packed.Packed(model, family)
        model.zero_grad()
        parts = []
        for edges in ((0, 9, 21), (0, 14, 21)):
            places = forms.positions(edges, ids)
            with forms.forward(edges, places):
                parts.append(model(input_ids=ids, position_ids=places, use_cache=False).logits)
        sum(part.square().mean() for part in parts).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    wanted = grads()
    models.use_attention(model, grouped_attention)
    fp8.activation_checkpointing(family.layers(model), "full")
    for name, grad in grads().items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-3, atol=1e-4, msg=name)
    models.use_kernel(model, "flex", "foundation")
    with pytest.raises(ModelError, match="which Octavo does not pass to flex attention"):
        grads()


def test_processor_returns_token_ids(saved: Path, tmp_path: Path) -> None:
    config = mpt.MPTConfig(**SIZES, num_labels=1, pad_token_id=0)
    torch.manual_seed(0)
    mpt.MPTForSequenceClassification(config).save_pretrained(tmp_path)
    model = models.load(tmp_path, scores=True)
    actual = model.transformer(input_ids=IDS[None]).last_hidden_state[:, -1] @ model.score.weight.T
    torch.testing.assert_close(model(input_ids=IDS[None]).logits, actual)


def test_more_tokens_than_learned_positions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a row has 17 tokens, but this MPT has 16 learned positions \(max_seq_len\)"):
        logits(made(), torch.zeros(17, dtype=torch.int64))
    assert len(logits(made(attn_config={"alibi": True}), torch.zeros(17, dtype=torch.int64))) == 17  # ALiBi has no end


def test_rows_longer_than_positions_fail_before_the_run_starts(saved: Path) -> None:
    words = [f"model.path={saved}", "train.seq_length=17", "train.steps=1"]
    cfg = load_config_text("data: {train: [{path: x.json}]}\nrun: {dir: out}", words)
    with pytest.raises(ModelError, match=r"train.seq_length is 17, .* is an MPT of 16 learned positions.*Lower train"):
        planning.meta_model(cfg)
    assert models.why_too_long(models.read_config(saved), 16) is None
    alibi = mpt.MPTConfig(**{**SIZES, "attn_config": {"alibi": True}})
    assert "raise max_seq_len in config.json" in str(models.why_too_long(alibi, 17))


def test_shrunk_gradients_of_embeddings() -> None:
    grads = []
    for share in (1.0, 0.25):
        model = made(embedding_fraction=share, tie_word_embeddings=False)
        loss = model(input_ids=IDS[None]).logits.square().mean()
        loss.backward()
        grads.append((loss.detach(), model.transformer.wpe.weight.grad, model.transformer.norm_f.weight.grad))
    torch.testing.assert_close(grads[0][0], grads[1][0])
    torch.testing.assert_close(0.25 * grads[0][1], grads[1][1])
    torch.testing.assert_close(grads[0][2], grads[1][2])


def test_dropout_is_applied_at_configured_places() -> None:
    for where in ({"resid_pdrop": 0.5}, {"emb_pdrop": 0.5}, {"attn_config": {"attn_pdrop": 0.5}}):
        model = made(**where)
        assert torch.equal(logits(model, IDS), logits(model, IDS))
        model.train()
        assert not torch.equal(logits(model, IDS), logits(model, IDS)), where


REFUSED = [
    ({"attn_config": {"attn_type": "multiquery_attention"}}, "attn_config.attn_type is 'multiquery_attention'"),
    ({"attn_config": {"kv_n_heads": 1}}, "attn_config.kv_n_heads is 1"),
    ({"attn_config": {"rope": True}}, "attn_config.rope is True"),
    ({"attn_config": {"sliding_window_size": 128}}, "attn_config.sliding_window_size is 128"),
    ({"attn_config": {"attn_logit_softcapping": 30.0}}, "attn_config.attn_logit_softcapping is 30.0"),
    ({"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm is True"),
    ({"attn_config": {"attn_uses_sequence_id": True}}, "data.packing"),
    ({"attn_config": {"fused_qkv": False}}, "attn_config.fused_qkv is False"),
    ({"attn_config": {"qk_ln": True, "qk_gn": True}}, "qk_ln and qk_gn"),
    ({"attn_config": {"alibi": "yes"}}, "attn_config.alibi is 'yes'"),
    ({"attn_config": {"clip_qkv": "6"}}, "attn_config.clip_qkv is '6'"),
    ({"attn_config": {"of_tomorrow": 1}}, "attn_config.of_tomorrow is 1, which Octavo does not support"),
    ({"ffn_config": {"ffn_type": "mptglu"}}, "ffn_config.ffn_type is 'mptglu'"),
    ({"ffn_config": {"ffn_act_fn": {"name": "quick_gelu"}}}, "ffn_config.ffn_act_fn is"),
    ({"ffn_config": {"moe_num_experts": 8}}, "ffn_config.moe_num_experts is 8"),
    ({"block_overrides": {"order": []}}, "block_overrides is"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ({"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm'"),
    ({"norm_eps": 1e-6, "layer_norm_epsilon": 1e-5}, "norm_eps is 1e-06 and layer_norm_epsilon 1e-05"),
    ({"logit_scale": "sqrt"}, "logit_scale is 'sqrt'"),
    ({"logit_scale": 0}, "logit_scale is 0"),
    ({"fc_type": "custom"}, "fc_type is 'custom'"),
    ({"ffn_config": {"fc_type": "custom"}}, "ffn_config.fc_type is 'custom'"),
    (
        {"ffn_config": {"ffn_act_fn": {"approximate": "tanh"}}},
        "ffn_act_fn is {'approximate': 'tanh'}; it must be an obj",
    ),
    ({"n_heads": -3}, "n_heads is -3; it must be an integer of at least 1"),
    ({"norm_eps": -1.0}, "norm_eps .layer_norm_epsilon. is -1.0"),
    ({"d_model": 25}, "d_model is 25, which 3 heads"),
    ({"embedding_fraction": 0.0}, "embedding_fraction is 0.0"),
    ({"resid_pdrop": 1.5}, "resid_pdrop is 1.5"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_fields_are_rejected_by_name(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mpt.MPTConfig(**{**SIZES, **fields})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with learned positions and biases; tests copy it."""
    folder = tmp_path_factory.mktemp("mpt")
    made().float().save_pretrained(folder)
    return folder


def changed(saved: Path, folder: Path, change) -> Path:
    """Copy a folder after `change` has modified its (config, tensors)."""
    config, tensors = json.loads((saved / "config.json").read_text()), load_file(saved / "model.safetensors")
    change(config, tensors)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_saved_folder_has_all_fields_and_is_read_back(saved: Path, tmp_path: Path) -> None:
    raw = json.loads((saved / "config.json").read_text())
    wanted = {"no_bias", "learned_pos_emb", "logit_scale", "norm_eps", "ffn_config", "init_config", "expansion_ratio"}
    assert wanted <= raw.keys() and raw["attn_config"]["alibi"] is False and "initializer_range" not in raw
    names = {
        name.removeprefix("transformer.blocks.0.")
        for name in load_file(saved / "model.safetensors")
        if ".1." not in name
    }
    parts = ("norm_1", "norm_2", "attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj")
    both = {f"{part}.{leaf}" for part in (*parts, "transformer.norm_f") for leaf in ("weight", "bias")}
    assert names == both | {"transformer.wte.weight", "transformer.wpe.weight"}
    torch.testing.assert_close(logits(models.load(saved), IDS).double(), logits(made(), IDS), rtol=1e-4, atol=1e-4)
    ignored = mpt.ignored_by_stock(models.read_config(saved))
    assert ignored == ["learned_pos_emb", "attn_config.alibi", "no_bias"]

    def of_the_hub(config, tensors) -> None:
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}

    warned = verify(saved).warnings
    assert [(one.kind, one.file) for one in warned if one.kind == "mpt-fields"] == [("mpt-fields", "config.json")]
    assert "learned_pos_emb, attn_config.alibi, no_bias are used by LLM-Foundry" in warned[0].text
    assert not hasattr(models.load(changed(saved, tmp_path / "hub", of_the_hub)).config, "auto_map")


def no(*keys: str):
    def change(config, tensors) -> None:
        for key in keys:
            (config["attn_config"] if key == "alibi" else config).pop(key)

    return change


FOUNDRY = ("ffn_config", "init_config", "fc_type", "architectures")


def test_config_values_that_transformers_rejects_do_not_affect_tokenizer(tmp_path: Path) -> None:
    """A published folder of LLM-Foundry has `clip_qkv: 6`, and transformers' class takes floats there; dropout of
    attention is whole there."""
    tiny.write("mpt", tmp_path / "m", size="mini")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["attn_config"] |= {"clip_qkv": 6, "attn_pdrop": 0.1}
    kind = type(load_tokenizer(tmp_path / "m"))
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert type(load_tokenizer(tmp_path / "m")) is kind


def test_missing_fields_have_the_writers_defaults(saved: Path, tmp_path: Path) -> None:
    stock = changed(saved, tmp_path / "foundry", no("no_bias", "alibi", "norm_eps", "layer_norm_epsilon"))
    assert logits(models.load(stock), IDS).equal(logits(models.load(saved), IDS))
    absent = changed(saved, tmp_path / "absent", no("no_bias", *FOUNDRY))
    with pytest.raises(
        ModelError, match=r"without biases, and the tensors have biases.*do not set no_bias|no_bias: false"
    ):
        models.load(absent)
    (absent / "model.safetensors").unlink()
    assert models.read_config(absent).no_bias and models.read_config(absent).initializer_range == 0.02


def drop(end: str):
    def change(config, tensors) -> None:
        for name in [name for name in tensors if name.endswith(end)]:
            del tensors[name]

    return change


def rename(one: str, other: str):
    def change(config, tensors) -> None:
        for name in [name for name in tensors if one in name]:
            tensors[name.replace(one, other)] = tensors.pop(name)

    return change


def alibi_on(config, tensors) -> None:
    config["attn_config"]["alibi"] = True


CONTRADICTIONS = [
    (alibi_on, "without learned positions, and the tensors have learned positions"),
    (drop("wpe.weight"), "with learned positions, and the tensors have no learned positions"),
    (drop(".bias"), "with biases, and the tensors have no biases"),
    (lambda config, tensors: config["attn_config"].update(qk_ln=True), "with norms of queries and keys"),
    (rename("ffn.up_proj.weight", "ffn.fc1_weight"), r"ffn.fc1_weight is of TransformerEngine.*up_proj.weight"),
    (rename("Wqkv", "Wq"), "q, k and v are one Wqkv"),
]


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS, ids=[message for _, message in CONTRADICTIONS])
def test_tensors_that_contradict_the_configuration_are_refused(
    saved: Path, tmp_path: Path, change, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        models.load(changed(saved, tmp_path / "folder", change))


@pytest.mark.parametrize(
    ("init", "spreads"),
    [
        ({}, {"wte": (2 / 256) ** 0.5, "Wqkv": (2 / 256) ** 0.5, "out_proj": (2 / 256 / 4) ** 0.5,
              "up_proj": (2 / 256) ** 0.5, "down_proj": (2 / 1024 / 4) ** 0.5}),
        ({"name": "baseline_", "init_std": 0.1, "emb_init_std": 0.3, "init_div_is_residual": 2.0},
         {"wte": 0.3, "wpe": 0.3, "Wqkv": 0.1, "out_proj": 0.05, "down_proj": 0.05}),
        ({"name": "neox_init_"}, {"wte": (2 / 1280) ** 0.5, "down_proj": (2 / 1280) ** 0.5 * 10**0.5 / 2}),
    ],
    ids=["kaiming", "baseline", "neox"],
)  # fmt: skip
def test_weights_are_initialized_by_init_config(tmp_path: Path, init: dict, spreads: dict[str, float]) -> None:
    config = mpt.MPTConfig(**{**SIZES, "d_model": 256, "n_heads": 4, "vocab_size": 300}, init_config=init)
    config.save_pretrained(tmp_path)
    drawn = dict(models.init_model(tmp_path, seed=3).named_parameters())
    for part, wanted in spreads.items():
        actual = [float(value.detach().std()) for name, value in drawn.items() if name.endswith(f"{part}.weight")]
        assert actual and actual == pytest.approx([wanted] * len(actual), rel=0.05), part
    assert all(not value.any() for name, value in drawn.items() if name.endswith(".bias"))
    given = dict(models.init_model(tmp_path, seed=3, std=0.07).named_parameters())[
        "transformer.blocks.0.ffn.down_proj.weight"
    ]
    assert float(given.detach().std()) == pytest.approx(0.07, rel=0.05)


@pytest.mark.parametrize(
    "init", [{"init_div_is_residual": "x"}, {"init_div_is_residual": 0}, {"init_nonlinearity": "gelu"},
             {"emb_init_std": -1.0}]
)  # fmt: skip
def test_init_config_without_standard_deviation_is_rejected(init: dict) -> None:
    with pytest.raises(ModelError, match="init_config .* gives .* standard deviation .*Correct it"):
        mpt.MPTForCausalLM(mpt.MPTConfig(**SIZES, init_config=init))


def test_unknown_init_scheme_is_rejected_when_weights_are_drawn(saved: Path, tmp_path: Path) -> None:
    folder = changed(
        saved, tmp_path / "odd", lambda config, tensors: config["init_config"].update(name="xavier_normal_")
    )
    models.load(folder)
    with pytest.raises(ModelError, match="init_config.name is 'xavier_normal_'"):
        models.init_model(folder)


def test_fp8_by_the_plan_in_every_linear_layer_of_the_blocks(saved: Path) -> None:
    model = models.load(saved)
    plan = fp8.plan(model, "blockwise")
    planned = {row.name.rpartition(".")[2] for row in plan.rows if row.recipe is not None}
    assert planned == {"Wqkv", "out_proj", "up_proj", "down_proj"}
