"""``tf.compat.v1.random``: the candidate samplers."""

from ...random import all_candidate_sampler as all_candidate_sampler
from ...random import fixed_unigram_candidate_sampler as fixed_unigram_candidate_sampler
from ...random import learned_unigram_candidate_sampler as learned_unigram_candidate_sampler
from ...random import log_uniform_candidate_sampler as log_uniform_candidate_sampler
from ...random import set_seed as set_random_seed
from ...random import uniform_candidate_sampler as uniform_candidate_sampler

__all__ = ["set_random_seed"]
