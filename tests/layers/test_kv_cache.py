import jax
import jax.numpy as jnp
import numpy as np
from steps import GEMMA, LLAMA

from jaxserve.layers.kv_cache import init_kv_cache, write_kv
from jaxserve.models import get_model


def test_each_kind_has_the_layers_of_its_own():
    for hf, expected in ((LLAMA, {"full": 5}), (GEMMA, {"sliding": 3, "full": 2})):
        config = get_model(hf).config
        kv = init_kv_cache(config, num_pages=5, page_size=4, dtype=jnp.bfloat16)
        assert {kind: cache.k.shape for kind, cache in kv.items()} == {
            kind: (n, 5, 4, 2, 8) for kind, n in expected.items()
        }
        assert all(cache.k.dtype == cache.v.dtype == jnp.bfloat16 and cache.page_size == 4 for cache in kv.values())


def test_rows_go_to_their_page_and_offset_of_one_layer_and_nowhere_else():
    kv = init_kv_cache(get_model(LLAMA).config, num_pages=5, page_size=4, dtype=jnp.bfloat16)
    k, v = jax.random.normal(jax.random.key(0), (2, 3, 2, 8))
    pages, offsets = np.asarray([4, 1, 4]), np.asarray([0, 3, 2])
    written = write_kv(kv["full"], 2, k, v, jnp.asarray(pages), jnp.asarray(offsets))
    for cache, rows in ((written.k, k), (written.v, v)):
        np.testing.assert_array_equal(cache[2, pages, offsets], rows.astype(jnp.bfloat16))
        assert np.count_nonzero(np.asarray(cache, np.float32)) == rows.size
