"""Every test runs under strict numerics, on eight CPU devices, with the shapes of public functions checked."""

import signal

import jax
from jaxtyping import install_import_hook

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if jax.__version_info__ >= (0, 12):  # the interpreter of an older one is not tested
    import interpreted_wgmma  # noqa: F401

# Functions only: modules that define pytrees stay out, since a check of their fields breaks trees of shapes.
layers = ("attention", "contract", "decoder", "embedding", "linear", "mlp", "moe", "norm", "rope")
layers += ("sparse.page_meta", "sparse.selection")
kernels = ("paged_attention.reference", "paged_attention.xla")
sharding = ("collectives", "kv_parallel")
parts = {"layers": layers, "pallas_kernels": kernels, "sharding": sharding}
install_import_hook(
    [*(f"jaxserve.{part}.{m}" for part, modules in parts.items() for m in modules), "jaxserve.models"],
    "beartype.beartype",
)
