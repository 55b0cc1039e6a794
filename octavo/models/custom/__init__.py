"""Architectures that transformers does not have: MPT, NVILA, LLaVA-OneVision-1.5."""
