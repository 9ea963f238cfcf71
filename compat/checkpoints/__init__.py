"""
Checkpoints of other programs: their tensors by name, the tables of a model that these are, and the way between them.

Formats are built on it: :mod:`torchsparse_rec.compat.tensorflow` reads and writes TensorFlow's and Keras's files,
:mod:`torchsparse_rec.compat.torchrec` reads TorchRec's. The names are the library's own: they may change from one
version to the next.
"""
