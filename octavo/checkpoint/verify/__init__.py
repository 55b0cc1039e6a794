"""`octavo verify`: checks a model folder and predicts what transformers, vLLM and SGLang do with it."""

from octavo.checkpoint.verify.findings import VerifyResult
from octavo.checkpoint.verify.verify import verify

__all__ = ["VerifyResult", "verify"]
