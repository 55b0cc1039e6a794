"""What vLLM and SGLang do with the tensors of a folder, predicted by the rules of their loaders; no server is run."""

from octavo.checkpoint.verify.servers.contents import Contents
from octavo.checkpoint.verify.servers.files import read_server_files
from octavo.checkpoint.verify.servers.loading import predict

__all__ = ["Contents", "predict", "read_server_files"]
