"""Which device programs are made for."""

import jax

from jaxserve.pallas_kernels.target import target_device


def test_it_is_the_default_device_however_it_is_named():
    first = jax.devices()[0]
    other = jax.devices("cpu")[-1]
    assert target_device() == first
    with jax.default_device(other):
        assert target_device() is other
    with jax.default_device("cpu"):
        assert target_device() == first
