"""Rooms of the sampler's per-slot state; the input side refuses what does not fit. Free of jax on purpose."""

MAX_STOP_IDS = 64  # EOS ids and stop_token_ids of a request
MAX_BIAS = 512  # logit_bias entries of a request
MAX_BAD_WORDS = 32  # spellings; a bad word has two
MAX_BAD_WORD_LEN = 8  # tokens
