"""The version of Octavo, in a module that imports nothing."""

__version__ = "0.6.0.dev0"
