"""Makes one channel of an MLP a million times larger, and the weights that read it a million times smaller.

In high precision the outputs of the model do not change, but with one scale per tensor the other channels underflow in
FP8. Trained models have such channels (M. Fishman et al., Scaling FP8 training to trillion-token LLMs,
arXiv:2409.12517).

python examples/outliers.py FOLDER OUT [LAYER]
"""

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

FACTOR = 1e6


def plant(folder: Path, out: Path, layer: int) -> None:
    """Write the model of a Hugging Face folder with an outlier in channel 0 of a layer's gated MLP."""
    shutil.copytree(folder, out)
    mlp = f"model.layers.{layer}.mlp"
    for file in out.glob("*.safetensors"):
        weights = load_file(file)
        if f"{mlp}.up_proj.weight" in weights:
            weights[f"{mlp}.up_proj.weight"][0] *= FACTOR  # this row computes the channel
        if f"{mlp}.down_proj.weight" in weights:
            weights[f"{mlp}.down_proj.weight"][:, 0] /= FACTOR  # this column reads it
        save_file(weights, file, metadata={"format": "pt"})


if __name__ == "__main__":
    plant(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
