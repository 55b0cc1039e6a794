"""`octavo convert`: converts Hugging Face folders to DCP checkpoints and back, bit for bit."""

from octavo.checkpoint.convert.convert import (
    ConversionResult,
    dcp_to_hf,
    hf_to_dcp,
    lora_hf_to_dcp,
    was_converted_by_octavo,
)

__all__ = ["ConversionResult", "dcp_to_hf", "hf_to_dcp", "was_converted_by_octavo", "lora_hf_to_dcp"]
