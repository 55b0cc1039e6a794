"""Architectures that transformers does not ship: MPT, NVILA, LLaVA-OneVision-1.5."""
