"""The parity layer: TensorFlow's names and behaviour on torch tensors, converters, and the parity check."""

if __name__ == "compat":
    raise ImportError("import it as torchsparse_rec.compat: the folder compat/ is no package of its own")
