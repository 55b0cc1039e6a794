"""What a run may say. ``load_config("run.yaml", ["train.lr=3e-4"])`` gives a checked, frozen :class:`Config`.

No torch is imported here, so a wrong file is answered at once, with every problem in it.
"""

from octavo.config.config import Config
from octavo.config.export import SCHEMA_FILE, json_schema, schema_text, to_yaml
from octavo.config.load import load_config, load_config_text, override
from octavo.config.sections.all_sections import RunSection
from octavo.config.sections.fp8 import Component, Fp8Section, Rule
from octavo.config.sections.model import LoadInFp8Section, ModelSection
from octavo.config.sections.names import COMPONENTS, RECIPES
from octavo.config.sections.train import (
    DataSection,
    Dataset,
    LoraSection,
    OptimizerSection,
    ParallelSection,
    TrainSection,
)
from octavo.config.yaml.problems import ConfigError, Place, Problem

__all__ = [
    "COMPONENTS",
    "RECIPES",
    "SCHEMA_FILE",
    "Component",
    "Config",
    "ConfigError",
    "DataSection",
    "Dataset",
    "Fp8Section",
    "LoadInFp8Section",
    "LoraSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "Place",
    "Problem",
    "Rule",
    "RunSection",
    "TrainSection",
    "json_schema",
    "load_config",
    "load_config_text",
    "override",
    "schema_text",
    "to_yaml",
]
