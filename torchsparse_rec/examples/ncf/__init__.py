"""Neural collaborative filtering on MovieLens: ``python -m torchsparse_rec.examples.ncf``."""
