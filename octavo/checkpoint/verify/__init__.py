"""Is a folder what it says it is, and what will transformers, vLLM and SGLang do with it: `octavo verify`."""

from octavo.checkpoint.verify.findings import Verified
from octavo.checkpoint.verify.verify import verify

__all__ = ["Verified", "verify"]
