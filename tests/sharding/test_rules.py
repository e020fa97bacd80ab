"""The rules table, and parameters on their devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.quantized import quantize_int8
from jaxserve.sharding.heads import head_layout
from jaxserve.sharding.mesh import FLAT, bytes_per_device, make_mesh
from jaxserve.sharding.placement import placement
from jaxserve.sharding.rules import param_specs, spec_of


def test_dimensions_go_where_the_table_says():
    assert spec_of(("qkv", "embed")) == jax.P(("tp",), None)
    assert spec_of(("experts", None, "embed")) == jax.P(FLAT, None, None)


def test_two_dimensions_on_one_mesh_axis_are_refused():
    with pytest.raises(ValueError, match=r"\('experts', 'mlp'\) collide: .* name one of them None"):
        spec_of(("experts", "mlp"))


def test_a_name_without_a_rule_is_refused():
    with pytest.raises(ValueError, match=r"must be among \['embed', .*, got \['head'\]"):
        spec_of(("head", "embed"))


def test_specs_of_stacks_and_8_bit_leaves():
    weight = quantize_int8(jnp.ones((2, 4, 8)))  # a stack of two layers
    specs = param_specs({"layers": {"full": {"o": weight}}}, {"o": ("embed", "heads")})
    assert (specs["layers"]["full"]["o"].q, specs["layers"]["full"]["o"].scale) == (
        jax.P(None, None, FLAT),
        jax.P(None, None),
    )


@pytest.mark.parametrize("on_host", [True, False])
def test_rows_lie_rank_by_rank_with_zeros_between(on_host):
    mesh = make_mesh(2, 2)
    leaf = np.arange(1, 2 * 5 + 1, dtype=np.float32)[:, None]  # gate 1..5, up 6..10
    place = placement(leaf.shape, ("gate_up", "embed"), mesh, head_layout(4, 4, 2, 2), 8)
    put = place.put(leaf if on_host else jnp.asarray(leaf))
    parts = [[1, 2, 6, 7], [3, 4, 8, 9], [5, 0, 10, 0], [0, 0, 0, 0]]
    assert put[:, 0].tolist() == [row for part in parts for row in part]
    by_rank = {shard.device: shard.data[:, 0].tolist() for shard in put.addressable_shards}
    assert [by_rank[device] for device in mesh.devices.T.flat] == parts  # ranks of tp first
    assert bytes_per_device(put.shape, put.dtype, put.sharding) == place.bytes_per_device(leaf) == 16


def test_a_mesh_may_use_fewer_devices_than_there_are():
    assert make_mesh(3, 1).devices.tolist() == [[device] for device in jax.devices()[:3]]
    assert make_mesh(1, 1) is None


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="kv_parallel_size 3 x tensor_parallel_size 4 needs 12 devices, got 8"):
        make_mesh(3, 4)
