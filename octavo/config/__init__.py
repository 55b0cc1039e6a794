"""The configuration of a run: ``load_config("run.yaml", ["train.lr=3e-4"])`` returns a checked, frozen :class:`Config`.

This package does not import torch, so a wrong file is reported at once, with every problem in it.
"""

from octavo.config.config import Config
from octavo.config.export import SCHEMA_FILE, json_schema, schema_text, to_yaml
from octavo.config.load import load_config, load_config_text, override
from octavo.config.sections.data import Dataset
from octavo.config.sections.fp8 import Component, Fp8Section, Rule
from octavo.config.sections.lora import LoraSection
from octavo.config.sections.names import COMPONENTS, RECIPES
from octavo.config.yaml.problems import ConfigError, Problem

__all__ = [
    "COMPONENTS",
    "RECIPES",
    "SCHEMA_FILE",
    "Component",
    "Config",
    "ConfigError",
    "Dataset",
    "Fp8Section",
    "LoraSection",
    "Problem",
    "Rule",
    "json_schema",
    "load_config",
    "load_config_text",
    "override",
    "schema_text",
    "to_yaml",
]
