"""Evaluates generated answers for `octavo eval --answers`: a greedy answer to the last question of each held-out row is
scored by the configuration's rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo import generation
from octavo.config import Config
from octavo.config.sections.rl import RlSection
from octavo.data.loaders.from_config import prompt_set
from octavo.data.loaders.rows_from_config import prompt_columns
from octavo.data.tasks.prompts import PromptEncoder
from octavo.parallel import World
from octavo.rl.phases.rl_phase import make_rewards
from octavo.rl.phases.settings import make_sampling
from octavo.rl.rollout.rollout import SharedEngine, evaluate_held_out
from octavo.train import TrainError
from octavo.train.artifacts import Target
from octavo.train.artifacts import evaluate_target as evaluate_losses
from octavo.train.artifacts.evaluate import Log
from octavo.train.forward.forward import Forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def evaluate_target(
    target: Target,
    cfg: Config | None = None,
    *,
    answers: int,
    max_new_tokens: int | None = None,
    log: Log = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Return the figures of `octavo.train.artifacts.evaluate_target`, and figures of generated answers: `reward`,
    `length`, `completions/clipped_ratio`, `rewards/NAME/mean`, `completions`.

    answers         number of rows to answer, from the first; 0 for all
    max_new_tokens  length limit of an answer, or None for the value in the section rl (64 without that section)

    Without a section rl the reward is exact_match. Raises TrainError for sealed rows, and the errors of evaluation,
    generation and rewards.
    """

    def score_answers(
        model: PreTrainedModel, processor: Any, forward: Forward, eval_cfg: Config
    ) -> Mapping[str, float | None]:
        rl = eval_cfg.rl or RlSection.model_validate({"rewards": ["exact_match"], "max_new_tokens": 64})
        rl = rl.model_copy(update={} if max_new_tokens is None else {"max_new_tokens": max_new_tokens})
        # A truncated prompt would be a different question, so a row that is too long is an error.
        whole_rows = eval_cfg.data.model_copy(update={"train_on_prompt": False, "on_long": "error"})
        answer_cfg = eval_cfg.model_copy(update={"data": whole_rows})
        rows = prompt_set(answer_cfg, processor, prompts=answers or None, reserve=rl.max_new_tokens)
        context = generation.Context(forward.autocast)
        engine = generation.Engine(model, processor, context, slots=1, kv=rl.kv, pages=rl.pages, log=log)
        assert isinstance(rows.encoder, PromptEncoder)
        sampling = make_sampling(rl, answer_cfg.run.seed, 0, rows.encoder.places)
        with make_rewards(rl) as rewards:
            rewards.expect(prompt_columns(answer_cfg, answer_cfg.data.eval))
            prompts = [prompt for batch in rows for prompt in batch]
            world = World(device=forward.device)
            shared = SharedEngine(engine, rl)
            figures = evaluate_held_out(shared, 0, rewards, processor.tokenizer, prompts, sampling, rl, world)
            for sentence in rewards.take_reports()[0]:
                log(f"note: {sentence}")
            return figures

    if (chosen := cfg or target.cfg) is not None and chosen.data.sealed:
        raise TrainError(
            "generated answers are scored as text, which sealed rows do not contain: evaluate without --answers, or "
            "unseal the model (octavo unseal) and evaluate it on plain rows"
        )
    return evaluate_losses(target, cfg, log=log, extra=score_answers, **options)
