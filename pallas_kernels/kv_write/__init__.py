"""The write of a step's keys and values into their pages, in one kernel for TPU.

In plain XLA the same is a scatter (`layers.kv_cache.write_kv`), which a TPU does row by row, one after the other.
"""

from jaxserve.pallas_kernels.kv_write.mosaic_tpu import kv_write as kv_write, unsupported as unsupported
