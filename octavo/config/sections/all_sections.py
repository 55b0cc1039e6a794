"""All sections of a configuration, one frozen type for each section of the YAML file, each field with its meaning.

These types are the only list of options. The JSON schema for editors, the nearest-name hints and ``octavo schema`` are
derived from them. Importing them imports no torch, so a wrong file is answered in a fraction of a second. Rules that
need two fields at once are in :mod:`octavo.config.rules.general`.
"""

from __future__ import annotations

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
    """The sections of a run side by side: what rules look at. With the rules kept it is a `Config`."""

    model: ModelSection = Field(description="The checkpoint to train.")
    fp8: Fp8Section = Field(default_factory=Fp8Section, description="What runs in FP8 and how.")
    lora: LoraSection | None = Field(
        default=None, description="Train low-rank adapters beside a frozen base; absent: train the model's parameters."
    )
    data: DataSection = Field(description="What the model sees.")
    train: TrainSection = Field(description="The step.")
    rl: RlSection | None = Field(default=None, description="Reinforcement learning (train.phase: rl).")
    preference: PreferenceSection | None = Field(
        default=None, description="Learning from pairs (train.phase: preference); absent there: DPO, beta 0.1."
    )
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="AdamW.")
    parallel: ParallelSection = Field(default_factory=ParallelSection, description="How ranks share the model.")
    run: RunSection = Field(default_factory=RunSection, description="Where the run lives and what it writes.")
