"""Training programs, each one command: ``python -m torchsparse_rec.examples`` lists them."""
