"""The numbers that stand for reductions in the schemas: ``tsr::Reduction`` of csrc/checks.h."""

SUM = 0
MEAN = 1
SQRTN = 2
MAX = 3
MIN = 4
PROD = 5

#: How the rows of a bag are pooled, by the names that lookups take.
POOLING = {"sum": SUM, "mean": MEAN, "sqrtn": SQRTN, "max": MAX}
