"""The parts of :class:`torchsparse_rec.nn.EmbeddingVariable`."""
