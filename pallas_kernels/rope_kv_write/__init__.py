"""Rotary embedding of this step's queries and keys, and the write of its keys and values, in one kernel for Hopper.

In plain XLA the same is `layers.rope.apply_rope` and `layers.kv_cache.write_kv`.
"""

from jaxserve.pallas_kernels.rope_kv_write.mosaic_gpu import (
    for_heads as for_heads,
    rope_kv_write as rope_kv_write,
    unsupported as unsupported,
    unsupported_heads as unsupported_heads,
)
