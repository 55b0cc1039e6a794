"""The phase of reinforcement learning: creates prompts, rewards and engine, and the stepper that uses them
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
from octavo.generation.engines import RolloutEngine
from octavo.models.folder.folder import find_file
from octavo.rl.fleet.fleet import check_engine, start_fleet
from octavo.rl.objectives.metrics import TRL_NAMES
from octavo.rl.phases.completions_log import CompletionsLog
from octavo.rl.phases.reference import make_reference
from octavo.rl.phases.reward_errors import RewardErrors
from octavo.rl.phases.rl_step import RlStepper
from octavo.rl.phases.settings import Settings
from octavo.rl.phases.stepper_protocol import Roles
from octavo.rl.rewards import Rewards
from octavo.rl.rollout.rollout import SharedEngine, evaluate_held_out
from octavo.rl.rollout.same_weights import ROLLOUT_PROOF
from octavo.train import TrainError
from octavo.train.forward.evaluation import Answer
from octavo.train.run_dir.run_dir import PLAN, PROOF, read_json
from octavo.train.setup.phase import Phase
from octavo.train.step.step import Stepper


class RlPhase(Phase):
    """`train.phase: rl`."""

    names = ("rl",)
    tensorboard = TRL_NAMES
    no_loss_advice = (
        "If prompts were skipped for their length, lower rl.max_new_tokens or raise train.seq_length. If the rewards "
        "of each group are all equal (reward and reward_std in metrics.jsonl), rl.dynamic_sampling drops every group: "
        "use rewards or prompts that distinguish completions. rl.mask_truncated drops completions that "
        "rl.max_new_tokens cut off: raise it"
    )
    can_exhaust_data = True

    def __init__(self) -> None:
        self.rewards: Rewards | None = None
        self.reward_errors: RewardErrors | None = None
        self._engine: RolloutEngine | None = None
        self._loader: Loader | None = None
        self._prompts: EvalSet | None = None

    def check(self, cfg: Config) -> None:
        super().check(cfg)
        check_engine(cfg)
        if self.rewards is None:  # report unusable rewards before the run directory exists
            self.rewards = make_rewards(Settings.of(cfg).section)

    def fingerprints(self, cfg: Config) -> Mapping[str, str]:
        assert self.rewards is not None
        digests = {f"reward {one['name']}": str(one["sha256"]) for one in self.rewards.digest()}
        if ends := _end_tokens(find_file(Path(cfg.model.path), "generation_config.json")):
            digests["generation_config.json (which tokens end a completion)"] = ends
        return digests

    def loader(self, cfg: Config, processor: Any, **share: Any) -> Loader:
        rl = Settings.of(cfg).section
        assert self.rewards is not None
        self.rewards.expect(prompt_columns(cfg, (*cfg.data.train, *cfg.data.eval)))
        self._loader = prompt_loader(cfg, processor, prompts=rl.prompts, max_new_tokens=rl.max_new_tokens, **share)
        return self._loader

    def evalset(self, cfg: Config, processor: Any, **share: Any) -> EvalSet | None:
        rl = Settings.of(cfg).section
        if cfg.data.eval and rl.eval_prompts:
            ranks = {name: share[name] for name in ("rank", "world")}  # `evalset` reports skipped rows
            self._prompts = prompt_set(cfg, processor, prompts=rl.eval_prompts, reserve=rl.max_new_tokens, **ranks)
        return super().evalset(cfg, processor, **share)

    def evaluate(self, stepper: Stepper, evalset: EvalSet, shown: list[Answer] | None = None) -> Mapping[str, Any]:
        """Evaluate held-out data. In addition to the base figures, returns the rewards of greedy answers to held-out
        prompts, named like the figures of a step."""
        figures = super().evaluate(stepper, evalset, shown if self._prompts is None else None)
        if self._prompts is None:
            return figures
        assert isinstance(stepper, RlStepper)
        roles, section = stepper.roles, stepper.settings.section
        stepper.send_weights(stepper.step_number)
        rewards = evaluate_held_out(
            roles.engine,
            stepper.step_number,
            roles.rewards,
            roles.tokenizer,
            [prompt for batch in self._prompts for prompt in batch],
            replace(stepper.sampling, step=stepper.step_number),
            section,
            stepper.world,
            lambda at: stepper.on_progress(f"held-out answers {at}"),
            shown,
        )
        if stepper.reward_errors is not None:
            stepper.reward_errors.report()
        return {**figures, **rewards}

    def stepper(
        self, plain: Stepper, processor: Any, directory: Path, step: int, log: Callable[[str], None]
    ) -> RlStepper:
        assert self.rewards is not None and self._loader is not None
        settings, world, forward = Settings.of(plain.cfg), plain.world, plain.forward
        section = settings.section
        if section.invariant and (why := fp8.why_not_batch_invariant(plain.model)):
            raise TrainError(f"rl.invariant: true is not possible: {why}")
        local = generation.Engine(
            plain.model,
            processor,
            generation.Context(forward.autocast, forward.dtype, world, forward.needs_dummy),
            slots=section.slots or 1,  # each rollout sets it
            kv=section.kv,
            pages=section.pages,
            invariant=section.invariant,
            log=log,
        )
        sender = None
        if section.engine.name == "octavo":
            self._engine = SharedEngine(local, section)
        else:
            fleet = start_fleet(plain, directory, log)
            self._engine, sender = fleet.engine, fleet.sender
        reference = make_reference(section.reference, plain, directory / PLAN, log) if settings.beta else None
        if self.rewards.on_bad == "zero":
            self.reward_errors = RewardErrors(self.rewards, world, log, step, plain.cfg.run.encrypt)
        stepper = RlStepper.from_stepper(
            plain,
            roles=Roles(self._engine, local, self.rewards, reference, self._loader.encoder.tokenizer),
            prompts=self._loader,
            reward_errors=self.reward_errors,
            log=CompletionsLog(directory, section.show, plain.cfg.run.encrypt) if world.is_main else None,
            sender=sender,
        )
        proof = read_json(directory / PROOF) or {}
        safe_read.check_schema(proof, {"rollouts": ROLLOUT_PROOF}, directory / PROOF, TrainError)
        stepper.weight_check.resume(proof.get("rollouts") or {}, step)
        return stepper

    def begin(self, stepper: Stepper, processor: Any, directory: Path, step: int, log: Callable[[str], None]) -> None:
        assert isinstance(stepper, RlStepper)
        if stepper.log is not None:
            stepper.log.begin(step)

    def proof(self, stepper: Stepper) -> Mapping[str, Any]:
        """Return the steps whose weights were checked, and `stale`, the number of updates between rollout and use."""
        assert isinstance(stepper, RlStepper)
        checked = stepper.weight_check.report(stepper.world)
        return {"rollouts": {**checked, "stale": stepper.settings.section.stale}} if checked else {}

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self.reward_errors is not None:
            self.reward_errors.close()
        if self.rewards is not None:
            self.rewards.close()


def _end_tokens(file: Path) -> str:
    """Return the end tokens in generation_config.json, as JSON. The fingerprint of the model folder does not include
    that file, because SFT does not read it."""
    tokens = safe_read.read_json(file, TrainError).get("eos_token_id") if file.is_file() else None
    return "" if tokens is None else json.dumps(tokens)


def make_rewards(rl: RlSection) -> Rewards:
    """Create the rewards of a configuration's section, whose paths are absolute."""
    entries = [{name: value for name, value in entry.model_dump().items() if value is not None} for entry in rl.rewards]
    kind = accelerator.default_device()
    device = f"{kind.type}:{os.environ.get('LOCAL_RANK', 0)}" if accelerator.has_own_memory(kind) else kind.type
    return Rewards(entries, Path.cwd(), rl.on_bad_reward, rl.reward_timeout, device)
