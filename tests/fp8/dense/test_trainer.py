"""FP8 in a stock Hugging Face Trainer, whose fused optimizer's writes are detected."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from octavo import fp8
from octavo.fp8.proof import Proof

STEPS, ACCUMULATE, LAYERS = 4, 2, 2


class Forget(TrainerCallback):
    """Drop all cached codes at each step, so that weights are always cast again."""

    def __init__(self, model):
        self.model = model

    def on_step_begin(self, *args, **kwargs):
        fp8.invalidate(self.model)


def train(directory, forget, checkpointing, optim="adamw_torch_fused", compiled=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=2, vocab_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # The five lines.
    plan = fp8.plan(model, "blockwise")
    fp8.apply(model, plan)
    ids = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(directory), max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=ACCUMULATE, learning_rate=0.05, optim=optim, report_to=[], logging_steps=1,
        save_strategy="no", use_cpu=True, disable_tqdm=True, gradient_checkpointing=checkpointing, seed=0,
        torch_compile=compiled, torch_compile_backend="aot_eager" if compiled else None,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[Forget(model)] if forget else [],
    )  # fmt: skip
    with fp8.count_gemms() as counts:
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return model, plan, counts, losses


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_stock_trainer_trains_in_fp8(tmp_path, checkpointing):
    model, plan, counts, losses = train(tmp_path, forget=False, checkpointing=checkpointing)
    micro = STEPS * ACCUMULATE
    assert len(losses) == STEPS
    for row in plan.rows:
        if row.fp8:
            assert counts[row.name, "fwd", "reference"] == counts[row.name, "wgrad", "reference"] == micro
    Proof(plan).observe(counts, {"foundation": micro})
    # One cast a step, whatever the accumulation and recomputation.
    layer = model.model.layers[1].mlp.up_proj
    assert isinstance(layer, fp8.Linear) and layer._site.codes.casts == STEPS
    _, _, _, again = train(tmp_path, forget=True, checkpointing=checkpointing)
    assert losses == again
    assert losses[-1] != losses[0]


@pytest.mark.long
def test_compiled_steps_are_counted_as_eager_ones(tmp_path):
    _, plan, want, losses = train(tmp_path, forget=False, checkpointing=False)
    _, _, counts, compiled_losses = train(tmp_path, forget=False, checkpointing=False, compiled=True)
    in_fp8 = sum(calls for (_, _, backend), calls in counts.items() if backend != fp8.HIGH)  # as the tutorial does
    assert in_fp8 == sum(row.fp8 for row in plan.rows) * 3 * STEPS * ACCUMULATE
    assert counts.calls == want.calls and counts.flops == want.flops and counts.total(layer="lm_head") > 0
    assert compiled_losses == pytest.approx(losses, rel=1e-5)


def test_saved_model_is_stock(tmp_path):
    model, _, _, _ = train(tmp_path, forget=False, checkpointing=False, optim="adamw_torch")
    model.save_pretrained(tmp_path / "out")
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert type(stock.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))
