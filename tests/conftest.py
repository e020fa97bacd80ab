"""Every test runs under strict numerics, on eight CPU devices, with the shapes of public functions checked."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

install_import_hook(["jaxserve.layers", "jaxserve.pallas_kernels", "jaxserve.models"], "beartype.beartype")
