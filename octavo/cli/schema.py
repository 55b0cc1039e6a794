"""Prints the JSON schema of the configuration: every key with its meaning, type and default.

For completion and validation in an editor, save it and put this at the top of a YAML file:
  # yaml-language-server: $schema=octavo.schema.json
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults()


def run(args: argparse.Namespace) -> int:
    from octavo.config import schema_text

    print(schema_text(), end="")
    return 0
