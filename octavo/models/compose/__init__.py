"""A vision-language model from parts: an image encoder, a fresh projector and a decoder become one folder."""
