"""Engines that generate completions for a trainer: in its process, or in others that receive its weights."""

from octavo.generation.engines.interface import Generation, RolloutEngine, StaleWeightsError
from octavo.generation.engines.manifest import Manifest, ManifestEntry, Pieces, Weights, read_tensors
from octavo.generation.engines.pool import Chunk, Event, ReplicaLostError, ReplicaPool, Transport

__all__ = [
    "Chunk",
    "Event",
    "Generation",
    "Manifest",
    "ManifestEntry",
    "Pieces",
    "ReplicaLostError",
    "ReplicaPool",
    "RolloutEngine",
    "StaleWeightsError",
    "Transport",
    "Weights",
    "read_tensors",
]
