"""What the models of these tests consist of."""

from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.up_proj = nn.Linear(width, width), nn.Linear(width, 2 * width)


class Custom(nn.Linear):
    pass
