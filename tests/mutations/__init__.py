"""Faults, which ``make mutate`` plants, and the tests that must notice them. One table for each kind of source."""
