"""Training programs, each one command."""
