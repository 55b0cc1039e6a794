"""TRL's methods, called on stand-ins for its trainers: log-probabilities are passed in instead of computed by a model.

Each function calls a method of the installed trl and returns its result, with the metrics that it logged.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
pytest.importorskip("trl", reason="the oracle of objectives is the installed trl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

SELF = SimpleNamespace


def _accelerator(**extra) -> SimpleNamespace:
    """Return a stand-in for accelerate's Accelerator with one process."""

    def identity(value, **_):
        return value

    return SELF(
        device=torch.device("cpu"), num_processes=1, process_index=0, reduce=identity, gather=identity,
        gather_for_metrics=identity, sync_gradients=True, **extra,
    )  # fmt: skip


def _trainer(**extra) -> SimpleNamespace:
    model = SELF(training=True, is_gradient_checkpointing=False)
    return SELF(
        accelerator=_accelerator(), model=model, _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False, **extra,
    )  # fmt: skip


def _logged(trainer: SimpleNamespace) -> dict[str, float]:
    return {name: float(values[-1]) for name, values in trainer._metrics["train"].items()}


def grpo_loss(
    loss_type: str, logps: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, *, ref: Tensor | None = None,
    weights: Tensor | None = None, entropy: Tensor | None = None, low: float = 0.2, high: float = 0.2,
    beta: float = 0.0, kl_weighted: bool = True, entropy_bonus: float = 0.0, level: str = "token", longest: int = 1,
    tokens: float | None = None, parts: int = 1,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Call GRPOTrainer._compute_loss for one of `parts` micro-batches; `tokens` is the count over all of them (dapo,
    cispo)."""
    entropy = torch.zeros_like(logps) if entropy is None else entropy
    trainer = _trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropy, None),
        args=SELF(use_bias_correction_kl=kl_weighted, delta=None, steps_per_generation=parts),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level, beta=beta,
        loss_type=loss_type, epsilon_low=low, epsilon_high=high, use_vllm=weights is not None,
        vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=parts,
        max_completion_length=longest, _entropy_bonus_enabled=bool(entropy_bonus), use_adaptive_entropy=False,
        entropy_coef=entropy_bonus,
    )  # fmt: skip
    b = len(logps)
    inputs = {
        "prompt_ids": torch.zeros(b, 1, dtype=torch.long), "prompt_mask": torch.ones(b, 1, dtype=torch.long),
        "completion_ids": torch.zeros(logps.shape, dtype=torch.long), "completion_mask": mask.long(),
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum() if tokens is None else torch.tensor(tokens),
    }  # fmt: skip
    return GRPOTrainer._compute_loss(trainer, None, inputs), _logged(trainer)


def rloo_loss(
    logps: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, dict[str, float]]:
    trainer = _trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros_like(logps), None),
        epsilon_low=low, epsilon_high=high,
    )  # fmt: skip
    b = len(logps)
    inputs = {
        "prompt_ids": torch.zeros(b, 1, dtype=torch.long), "prompt_mask": torch.ones(b, 1, dtype=torch.long),
        "completion_ids": torch.zeros(logps.shape, dtype=torch.long), "completion_mask": mask.long(),
        "advantages": advantages, "old_logps": (old * mask).sum(1),
    }  # fmt: skip
    return RLOOTrainer._compute_loss(trainer, None, inputs), _logged(trainer)


def score_completions(
    trainer_class: type, rewards: Tensor, lengths: list[int], old: Tensor | None = None, sampled: Tensor | None = None,
    ref: Tensor | None = None, *, scale: str = "group", normalise: bool = False, beta: float = 0.0,
    mode: str = "token_truncate", low: float | None = None, high: float | None = None, truncated: list[bool] = (),
) -> tuple[dict[str, Tensor], dict[str, float]]:  # fmt: skip
    """Call _generate_and_score_completions of GRPOTrainer or RLOOTrainer for rewards [P, G] and completion lengths.

    Returns its outputs (`advantages`, `importance_sampling_ratio`, `completion_mask`) and the logged metrics."""
    group, is_grpo = rewards.shape[1], trainer_class is GRPOTrainer
    end, ids = 1, [[2] * (n - 1) + [1] for n in lengths]
    for row, cut in zip(ids, truncated, strict=False):
        row[-1] = 2 if cut else end
    n = len(ids)
    if sampled is None:
        sampled_lists = None
    else:
        sampled_lists = [row[:length].tolist() for row, length in zip(sampled, lengths, strict=True)]
    texts = ["x"] * n
    outputs = [[[0]] * n, ids, None, texts, sampled_lists, {}, None, None] if is_grpo else [[[0]] * n, ids, texts]
    logps = iter([old, ref] if old is not None else [ref])  # the log-probabilities in the order they are computed
    trainer = _trainer(
        environment_factories=None, tools=None, environments=None, pad_to_multiple_of=None, chat_template_kwargs={},
        _generate=lambda prompts: tuple(outputs), _tokenizer=SELF(pad_token_id=0), eos_token_ids=[end],
        mask_truncated_completions=any(truncated), num_generations=group, num_generations_eval=group,
        args=SELF(
            per_device_train_batch_size=n, gradient_accumulation_steps=1, steps_per_generation=1,
            generation_batch_size=n, gradient_checkpointing_kwargs=None,
        ),
        num_iterations=1, use_vllm=sampled is not None, vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high, beta=beta, ref_model=object(), off_policy_mask_threshold=None,
        _get_per_token_logps_and_entropies=lambda *_, **__: (next(logps), None, None),
        _calculate_rewards=lambda *_: rewards.reshape(-1, 1), reward_weights=torch.ones(1), reward_func_names=["r"],
        reward_funcs=[None], multi_objective_aggregation="sum_then_normalize", scale_rewards=scale,
        normalize_advantages=normalise, reward_clip_range=None, _logs=defaultdict(lambda: defaultdict(list)),
        _pending_extra_logs={}, _pending_metrics={}, log_multimodal=False, _is_vlm=False,
    )  # fmt: skip
    trainer._logs.update({name: [] for name in ("prompt", "completion", "advantages")})
    output = trainer_class._generate_and_score_completions(trainer, [{"prompt": "p"}] * n)
    return output, _logged(trainer)


def dpo_loss(
    logps: Tensor, mask: Tensor, ref: Tensor, losses: dict[str, float], beta: float, label_smoothing: float = 0.0
) -> tuple[Tensor, dict[str, float]]:
    """Call DPOTrainer._compute_loss for log-probabilities [2B, T], chosen first, and sums of the reference [2B]."""
    trainer = _trainer(
        ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=list(losses),
        loss_weights=list(losses.values()), beta=beta, label_smoothing=label_smoothing, use_weighting=False,
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = _completions(mask) | {
        "ref_chosen_logps": ref.chunk(2)[0],
        "ref_rejected_logps": ref.chunk(2)[1],
    }
    return DPOTrainer._compute_loss(trainer, lambda **_: _outputs(logps, mask), inputs, False), _logged(trainer)


def kto_loss(
    logps: Tensor, mask: Tensor, ref: Tensor, desirable: Tensor, mismatched: Tensor, ref_mismatched: Tensor, *,
    beta: float, weights: tuple[float, float],
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    trainer = _trainer(
        calculate_KL=True, precompute_ref_logps=True, loss_type="kto", beta=beta, desirable_weight=weights[0],
        undesirable_weight=weights[1], _total_train_tokens=0, _tp_size=1,
        _compute_kl_logps=lambda model, batch: mismatched,
    )  # fmt: skip
    inputs = _completions(mask) | {"label": desirable, "ref_logps": ref, "ref_KL_logps": ref_mismatched}
    return KTOTrainer._compute_loss(trainer, lambda **_: _outputs(logps, mask), inputs, False), _logged(trainer)


def reference_free_loss(
    trainer_class: type, chosen: Tensor, rejected: Tensor, nll: Tensor, **settings
) -> tuple[Tensor, dict[str, float]]:
    """Call get_batch_loss_metrics of ORPOTrainer or CPOTrainer for mean log-probabilities [B] and the nll of chosen
    answers."""
    logits = torch.zeros(1)
    trainer = _trainer(
        concatenated_forward=lambda model, batch: (chosen, rejected, logits, logits, nll), alpha=0.0, **settings
    )
    for name in ("odds_ratio_loss", "cpo_loss"):
        if hasattr(trainer_class, name):
            setattr(trainer, name, getattr(trainer_class, name).__get__(trainer))
    return trainer_class.get_batch_loss_metrics(trainer, None, {})


def cpo_pairs(chosen: Tensor, rejected: Tensor, **settings) -> Tensor:
    """Call CPOTrainer.cpo_loss, which has label smoothing; returns [B]."""
    return CPOTrainer.cpo_loss(_trainer(alpha=0.0, loss_type="sigmoid", **settings), chosen, rejected)[0]


def _completions(mask: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a one-token prompt with completions."""
    completion = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], dim=1)
    ids = torch.zeros_like(completion)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion}


def _outputs(logps: Tensor, mask: Tensor) -> SimpleNamespace:
    """Return the outputs of a model with TRL's fused head: log-probabilities are 0 at positions without a label."""
    zeros = torch.zeros_like(logps)
    return SELF(log_probs=logps * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


__all__ = [
    "CPOTrainer", "GRPOTrainer", "ORPOTrainer", "RLOOTrainer", "cpo_pairs", "dpo_loss", "grpo_loss", "kto_loss",
    "rloo_loss", "score_completions", "reference_free_loss",
]  # fmt: skip
