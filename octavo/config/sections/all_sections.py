"""All sections of a configuration: a frozen type for each section of the YAML file, with a description of each field.

These types are the only list of options. The JSON schema for editors, the nearest-name hints and ``octavo schema`` are
derived from them. They do not import torch, so a wrong file is reported in a fraction of a second. Rules over several
fields are in :mod:`octavo.config.rules.general`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octavo.config.sections.data import DataSection
from octavo.config.sections.fp8 import Fp8Section
from octavo.config.sections.lora import LoraSection
from octavo.config.sections.model import ModelSection
from octavo.config.sections.names import Section
from octavo.config.sections.rl import PreferenceSection, RlSection
from octavo.config.sections.run import RunSection
from octavo.config.sections.train import OptimizerSection, ParallelSection, TrainSection


class Sections(Section):
    """The sections of a run, as the rules read them. A `Config` also obeys the rules."""

    preset: Literal["fast"] | None = Field(
        default=None,
        description="Settings by one word, under keys that are not set: fast = fp8.fuse on, both gradients of the "
        "head in FP8 in the recipe of the language model (fp8.lm_head), both moments in FP8 (optimizer.states) and "
        "compiled blocks (train.compile).",
    )
    model: ModelSection = Field(description="The checkpoint to train.")
    fp8: Fp8Section = Field(default_factory=Fp8Section, description="What runs in FP8 and how.")
    lora: LoraSection | None = Field(
        default=None, description="Train low-rank adapters on a frozen base; absent: train the model's parameters."
    )
    data: DataSection = Field(description="The data sets and how rows become samples.")
    train: TrainSection = Field(description="The step.")
    rl: RlSection | None = Field(default=None, description="Reinforcement learning (train.phase: rl).")
    preference: PreferenceSection | None = Field(
        default=None, description="Learning from preferences (train.phase: preference); absent: DPO, beta 0.1."
    )
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="AdamW.")
    parallel: ParallelSection = Field(
        default_factory=ParallelSection, description="How ranks share the model and the data."
    )
    run: RunSection = Field(default_factory=RunSection, description="The run directory and what the run writes.")
