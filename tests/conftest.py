"""Every test runs under strict numerics, on eight CPU devices, with the shapes of public functions checked."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Functions only: modules that define pytrees stay out, since a check of their fields breaks trees of shapes.
layers = ("attention", "contract", "decoder", "embedding", "linear", "mlp", "moe", "norm", "rope")
kernels = ("paged_attention.reference", "paged_attention.xla")
install_import_hook(
    [*(f"jaxserve.layers.{m}" for m in layers), *(f"jaxserve.pallas_kernels.{m}" for m in kernels), "jaxserve.models"],
    "beartype.beartype",
)
