"""The phase of reinforcement learning: its prompts, its rewards, the engine, and the stepper that is given them
(:mod:`octavo.rl.phases.rl_step`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo import fp8, generation
from octavo.base import accelerator, safe_read
from octavo.config import Config
from octavo.config.sections.rl import RlSection
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.from_config import prompt_loader, prompt_set
from octavo.data.loaders.loader import Loader
from octavo.data.loaders.rows_from_config import prompt_columns
from octavo.models.folder.folder import at
from octavo.rl.objectives.metrics import TRL_NAMES
from octavo.rl.phases.completions_log import CompletionsLog
from octavo.rl.phases.reference import reference_for
from octavo.rl.phases.reward_errors import RewardErrors
from octavo.rl.phases.rl_step import RlStepper
from octavo.rl.phases.settings import Settings
from octavo.rl.phases.stepper_protocol import Roles
from octavo.rl.rewards import Rewards
from octavo.rl.rollout.rollout import evaluate_held_out
from octavo.rl.rollout.same_weights import PROVEN
from octavo.train import TrainError
from octavo.train.forward.evaluation import Answer
from octavo.train.run_dir.run_dir import PLAN, PROOF, read_json
from octavo.train.setup.phase import Phase
from octavo.train.step.step import Stepper


class RlPhase(Phase):
    """`train.phase: rl`."""

    names = ("rl",)
    tensorboard = TRL_NAMES
    starved = (
        "Where prompts were left out for their length, lower rl.max_new_tokens or raise train.seq_length. Where the "
        "rewards of each group are all equal (reward and reward_std in metrics.jsonl), rl.dynamic_sampling leaves "
        "nothing over: take rewards or prompts that tell completions apart. rl.mask_truncated leaves out what "
        "rl.max_new_tokens cut off: raise it"
    )
    exhausts = True

    def __init__(self) -> None:
        self.rewards: Rewards | None = None
        self.reward_errors: RewardErrors | None = None
        self._loader: Loader | None = None
        self._asked: EvalSet | None = None

    def check(self, cfg: Config) -> None:
        super().check(cfg)
        if self.rewards is None:  # before there is a run directory: a reward that cannot be used is found here
            self.rewards = rewards_of(Settings.of(cfg).section)

    def prints(self, cfg: Config) -> Mapping[str, str]:
        assert self.rewards is not None
        found = {f"reward {one['name']}": one["sha256"] for one in self.rewards.digest()}
        if ends := _ends(at(Path(cfg.model.path), "generation_config.json")):
            found["generation_config.json (which tokens end a completion)"] = ends
        return found

    def loader(self, cfg: Config, processor: Any, **share: Any) -> Loader:
        rl = Settings.of(cfg).section
        assert self.rewards is not None
        self.rewards.expect(prompt_columns(cfg, (*cfg.data.train, *cfg.data.eval)))
        self._loader = prompt_loader(cfg, processor, prompts=rl.prompts, max_new_tokens=rl.max_new_tokens, **share)
        return self._loader

    def evalset(self, cfg: Config, processor: Any, **share: Any) -> EvalSet | None:
        rl = Settings.of(cfg).section
        if cfg.data.eval and rl.eval_prompts:
            ranks = {name: share[name] for name in ("rank", "world")}  # what is left out is listed once, by evalset
            self._asked = prompt_set(cfg, processor, prompts=rl.eval_prompts, reserve=rl.max_new_tokens, **ranks)
        return super().evalset(cfg, processor, **share)

    def evaluate(self, stepper: Stepper, evalset: EvalSet, shown: list[Answer] | None = None) -> Mapping[str, Any]:
        """And the reward of greedy answers to held-out prompts, under the names that a step's figures have."""
        figures = super().evaluate(stepper, evalset, shown if self._asked is None else None)
        if self._asked is None:
            return figures
        assert isinstance(stepper, RlStepper)
        roles, section = stepper.roles, stepper.settings.section
        rewards = evaluate_held_out(
            roles.engine,
            roles.rewards,
            roles.tokenizer,
            [prompt for batch in self._asked for prompt in batch],
            replace(stepper.sampling, step=stepper.number),
            section,
            stepper.world,
            lambda at: stepper.doing(f"held-out answers {at}"),
            shown,
        )
        if stepper.reward_errors is not None:
            stepper.reward_errors.tell()
        return {**figures, **rewards}

    def stepper(
        self, plain: Stepper, processor: Any, directory: Path, step: int, say: Callable[[str], None]
    ) -> RlStepper:
        assert self.rewards is not None and self._loader is not None
        settings, world, forward = Settings.of(plain.cfg), plain.world, plain.forward
        section = settings.section
        if section.invariant and (why := fp8.why_not_batch_invariant(plain.model)):
            raise TrainError(f"rl.invariant: true cannot be: {why}")
        engine = generation.Engine(
            plain.model,
            processor,
            generation.Context(forward.autocast, forward.dtype, world, forward.needs_dummy),
            slots=section.slots or 1,  # each rollout says
            kv=section.kv,
            pages=section.pages,
            invariant=section.invariant,
            say=say,
        )
        reference = reference_for(section.reference, plain, directory / PLAN, say) if settings.beta else None
        if self.rewards.on_bad == "zero":
            self.reward_errors = RewardErrors(self.rewards, world, say, step, plain.cfg.run.encrypt)
        stepper = RlStepper.of(
            plain,
            roles=Roles(engine, self.rewards, reference, self._loader.encoder.tokenizer),
            prompts=self._loader,
            reward_errors=self.reward_errors,
            log=CompletionsLog(directory, section.show, plain.cfg.run.encrypt) if world.is_main else None,
        )
        proof = read_json(directory / PROOF) or {}
        safe_read.check_form(proof, {"rollouts": PROVEN}, directory / PROOF, TrainError)
        stepper.same.resume(proof.get("rollouts") or {}, step)
        return stepper

    def begin(self, stepper: Stepper, processor: Any, directory: Path, step: int, say: Callable[[str], None]) -> None:
        assert isinstance(stepper, RlStepper)
        if stepper.log is not None:
            stepper.log.begin(step)

    def proof(self, stepper: Stepper) -> Mapping[str, Any]:
        """Which steps learnt by the weights that wrote their completions; `stale`: so many updates before."""
        assert isinstance(stepper, RlStepper)
        found = stepper.same.report(stepper.world)
        return {"rollouts": {**found, "stale": stepper.settings.section.stale}} if found else {}

    def close(self) -> None:
        if self.reward_errors is not None:
            self.reward_errors.close()
        if self.rewards is not None:
            self.rewards.close()


def _ends(file: Path) -> str:
    """The tokens that it says end answers; no part of the model folder's own fingerprint, as SFT does not ask it."""
    named = safe_read.read_json(file, TrainError).get("eos_token_id") if file.is_file() else None
    return "" if named is None else json.dumps(named)


def rewards_of(rl: RlSection) -> Rewards:
    """The rewards of a configuration's section, whose paths are absolute."""
    given = [{name: value for name, value in entry.model_dump().items() if value is not None} for entry in rl.rewards]
    kind = accelerator.here()
    device = f"{kind.type}:{os.environ.get('LOCAL_RANK', 0)}" if accelerator.has_own_memory(kind) else kind.type
    return Rewards(given, Path.cwd(), rl.on_bad_reward, rl.reward_timeout, device)
