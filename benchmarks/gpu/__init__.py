"""``make gpu``: what the library does on an NVIDIA GPU, in stages of known length. The driver needs no torch."""
