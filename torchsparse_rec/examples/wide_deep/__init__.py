"""Wide & Deep learning on generated data or Criteo's: ``python -m torchsparse_rec.examples.wide_deep``."""
