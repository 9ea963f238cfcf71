"""DLRM on generated data or Criteo's, in tables without a vocabulary: ``python -m torchsparse_rec.examples.dlrm``."""
