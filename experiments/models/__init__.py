"""Models with named dims: a decoder in NNX and one in Linen, and their loss."""
