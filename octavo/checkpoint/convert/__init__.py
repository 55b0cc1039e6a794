"""`octavo convert`: converts Hugging Face folders to DCP checkpoints and back, bit for bit."""

from octavo.checkpoint.convert.convert import Converted, dcp_to_hf, hf_to_dcp, knows_its_folder, lora_hf_to_dcp

__all__ = ["Converted", "dcp_to_hf", "hf_to_dcp", "knows_its_folder", "lora_hf_to_dcp"]
