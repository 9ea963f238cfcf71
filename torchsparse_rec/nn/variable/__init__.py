"""What :class:`torchsparse_rec.nn.EmbeddingVariable` is made of."""
