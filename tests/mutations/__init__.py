"""Faults, and the tests that must notice them: what ``make mutate`` plants. Tables by where the faults lie."""
