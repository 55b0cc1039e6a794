"""Fp8Callback in Hugging Face's Trainer: delayed scaling resumes exactly, and reference models are checked."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from octavo import fp8
from octavo.checkpoint.trainer import Fp8Callback
from octavo.fp8.proof import reference_note

STEPS = 5
ROWS = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(32, (12, 8), generator=torch.Generator().manual_seed(0)).tolist()
]


def model_of(recipe: str | None = "delayed") -> LlamaForCausalLM:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **small))
    return model if recipe is None else fp8.apply(model, fp8.plan(model, recipe))


class Dies(TrainerCallback):
    """A run that ends in the midst of its fourth step, two after its checkpoint."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def trained(folder: Path, *callbacks: Any, resume: bool = False, **more: Any) -> Trainer:
    """A Trainer after its training; `callbacks` are types, Fp8Callback among them is given the trainer."""
    pytest.importorskip("accelerate")  # which Trainer needs
    args = TrainingArguments(
        folder, max_steps=STEPS, save_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, **more,
    )  # fmt: skip
    trainer = Trainer(model_of(), args, train_dataset=ROWS)
    for kind in callbacks:
        trainer.add_callback(kind(trainer) if kind is Fp8Callback else kind())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {**trainer.model.state_dict(), **fp8.scaling_state(trainer.model)}


def same(one: Trainer, other: Trainer) -> bool:
    mine, theirs = bits(one), bits(other)
    losses = [[row.get("loss") for row in t.state.log_history[:STEPS]] for t in (one, other)]
    return (
        mine.keys() == theirs.keys()
        and all(map(torch.equal, mine.values(), theirs.values()))
        and (losses[0] == losses[1])
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Uninterrupted."""
    return trained(tmp_path_factory.mktemp("whole"), Fp8Callback, save_strategy="no")


@pytest.mark.parametrize("restores", [False, True])  # the Trainer's own way with callbacks' states, too
def test_delayed_scaling_resumes_bit_for_bit(whole: Trainer, tmp_path: Path, restores: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, Fp8Callback, Dies)
    again = trained(tmp_path, Fp8Callback, resume=True, restore_callback_states_from_checkpoint=restores)
    assert again.state.global_step == STEPS and same(again, whole)


def test_resuming_without_saved_histories_is_reported(whole: Trainer, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", Dies)
    with pytest.warns(UserWarning, match="step 2 was written without Fp8Callback and holds no amax histories"):
        again = trained(tmp_path / "run", Fp8Callback, resume=True)
    assert not same(again, whole)
    assert (tmp_path / "run/checkpoint-4/trainer_state.json").read_text().count("fp8_amax_x") == 7


def test_checkpoint_of_another_recipe_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, Fp8Callback, Dies)
    monkeypatch.setitem(globals(), "model_of", lambda make=model_of: make("blockwise"))
    with pytest.raises(ValueError, match="amax histories do not belong to this model.*Resume with the recipe"):
        trained(tmp_path, Fp8Callback, resume=True)


def log_probs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ROWS[0]["input_ids"]])).logits.float().log_softmax(-1)


def test_reference_note_names_its_precision() -> None:
    """The sentence holds: log-probabilities at equal weights are equal, or not."""
    policy, stock = model_of("blockwise"), model_of(None)
    reloaded, copied, planned = stock, copy.deepcopy(policy), model_of("blockwise")
    wrapped = torch.nn.Module()
    wrapped.module = planned
    note = reference_note(policy, reloaded)
    assert "7 of 7 FP8 layers differ (first model.layers.0.self_attn.q_proj.weight: policy FP8 (x[" in note
    assert "reference high precision" in note and not torch.equal(log_probs(policy), log_probs(reloaded))
    for reference in (copied, planned, wrapped):
        assert "in FP8 as the policy does (7 layers): equal weights give equal" in reference_note(policy, reference)
    assert torch.equal(log_probs(policy), log_probs(copied)) and torch.equal(log_probs(policy), log_probs(planned))
    rules = (fp8.Rule("**.q_proj", recipe="blockwise"),)
    partly = fp8.apply(stock, fp8.plan(stock, fp8.Policy(recipe="tensorwise", rules=rules)))
    assert "6 of 7" in reference_note(policy, partly)
    assert reference_note(model_of(None), model_of(None)) is None
    delayed = model_of("delayed")
    assert "amax histories of its own in 7 layers" in reference_note(delayed, copy.deepcopy(delayed))


def test_reference_may_have_frozen_codes() -> None:
    """Codes of the policy's own cast serve for less memory; in a stock layer they are dequantized, which is told."""
    policy, reference = model_of("rowwise"), model_of(None)
    for module in reference.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = fp8.freeze_weight(module.weight, "row")
    assert "codes, dequantized (w[" in reference_note(policy, reference)
    fp8.apply(reference, fp8.plan(reference, "rowwise"))
    assert "equal weights give equal" in reference_note(policy, reference)
    assert torch.equal(log_probs(policy), log_probs(reference))


def test_callback_checks_reference_model_of_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")

    class WithReference(Trainer):
        """As TRL's trainers of preferences and policies hold it."""

        ref_model = model_of(None)

    args = TrainingArguments(tmp_path, max_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
    trainer, said = WithReference(model_of(), args, train_dataset=ROWS), []
    trainer.add_callback(Fp8Callback(trainer, said.append))
    trainer.train()
    assert len(said) == 1 and "the reference does not compute as the policy does: 7 of 7" in said[0]


def test_ranks_reduce_histories_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shared = model_of(), []
    monkeypatch.setattr("octavo.checkpoint.trainer.reduce_scaling_state", shared.append)
    Fp8Callback().on_step_end(None, None, None, model=model)
    assert not shared
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    Fp8Callback().on_step_end(None, None, None, model=model)
    assert shared == [model]


class Averages(TrainerCallback):
    """Puts an average in the place of the weights for an evaluation, and the weights back, through ``.data``."""

    invalidates = False

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before = [p.detach().clone() for p in model.parameters()]
        torch._foreach_mul_([p.data for p in model.parameters()], 0.99)
        control.should_evaluate = state.global_step == 3

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for p, value in zip(model.parameters(), getattr(self, "before", ()), strict=False):
            p.data.copy_(value)
        if self.invalidates:
            fp8.invalidate(model)


class Invalidates(Averages):
    invalidates = True


class WritesBetweenMicroSteps(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.model.layers[0].mlp.down_proj.weight.detach().numpy()[...] += 1e-2


def test_stale_codes_end_training_and_name_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "model_of", lambda make=model_of: make("blockwise"))
    monkeypatch.setattr(Trainer, "get_eval_dataloader", lambda self, *_: self.get_train_dataloader())
    with pytest.raises(RuntimeError, match=r"step 1: FP8 GEMMs of model.layers.0.mlp.down_proj multiply by codes"):
        trained(tmp_path / "micro", Fp8Callback, WritesBetweenMicroSteps, save_strategy="no")
    with pytest.raises(RuntimeError, match=r"step 3: FP8 GEMMs of .* and \d more .*fp8.invalidate\(model\)"):
        trained(tmp_path / "average", Fp8Callback, Averages, save_strategy="no")
    trained(tmp_path / "invalidated", Fp8Callback, Invalidates, save_strategy="no")
