"""The parts of dynamic tables: options, keys and rows, tiers, checkpoints."""
