"""What a layer costs on this machine, and the choice by it."""

from octavo.fp8.measuring.timing import time_calls

__all__ = ["time_calls"]
