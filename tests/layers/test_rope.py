import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.rope import RopeScaling, apply_rope, rope_frequencies, rotation

POSITIONS = jnp.asarray([0, 1, 5, 1000, 130_000])


def rotate(x, positions, frequencies):
    """Each pair (x[i], x[i + H/2]) as a complex number, times e^(i angle)."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.outer(positions, frequencies))[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def test_pairs_turn_by_position_times_frequency():
    x = jax.random.normal(jax.random.key(0), (5, 3, 64))
    frequencies = rope_frequencies(64, 10000.0)
    y = apply_rope(x, rotation(POSITIONS, frequencies))
    np.testing.assert_allclose(y[:4], rotate(x[:4], POSITIONS[:4], frequencies), atol=3e-4)
    np.testing.assert_allclose(y[0], x[0], atol=1e-6)
    interleaved = rotate(x, POSITIONS, frequencies).reshape(5, 3, 2, 32).swapaxes(2, 3).reshape(5, 3, 64)
    assert np.abs(y[1:4] - interleaved[1:4]).max() > 0.1
    assert np.abs(y[1:4] - rotate(x[1:4], POSITIONS[1:4] + 1, frequencies)).max() > 0.1


def test_scores_depend_on_the_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 128))
    frequencies = rope_frequencies(128, 500000.0)

    def score(i, j):
        turned = (apply_rope(x, rotation(jnp.asarray([n]), frequencies)) for x, n in ((q, i), (k, j)))
        return float(jnp.sum(next(turned) * next(turned)))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-3)
    assert score(7, 3) != pytest.approx(score(104, 101), abs=1e-3)


def test_bfloat16_keeps_its_dtype_and_is_rotated_in_float32():
    x = jax.random.normal(jax.random.key(0), (5, 2, 64), jnp.bfloat16)
    y = apply_rope(x, rotation(POSITIONS, rope_frequencies(64, 10000.0)))
    assert y.dtype == jnp.bfloat16
    wide = apply_rope(x.astype(jnp.float32), rotation(POSITIONS, rope_frequencies(64, 10000.0)))
    np.testing.assert_array_equal(y, wide.astype(jnp.bfloat16))


def test_linear_scaling_divides_every_frequency():
    plain, scaled = rope_frequencies(64, 1e4), rope_frequencies(64, 1e4, RopeScaling(kind="linear", factor=8.0))
    np.testing.assert_allclose(plain / 8, scaled, rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between():
    scaling = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    ratio = rope_frequencies(128, 500000.0, scaling) / rope_frequencies(128, 500000.0)
    wavelength = 2 * np.pi / rope_frequencies(128, 500000.0)
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 8192], 1 / 8, rtol=1e-6)
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(between) >= 3
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (np.diff(between) < 0).all()
    # At a wavelength of 8192 / 2 the blend stands at (2 - 1) / (4 - 1)
    middle = np.interp(4096, wavelength, ratio)
    assert middle == pytest.approx(1 / 3 + 2 / 3 / 8, abs=0.02)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "linear", "factor": 0.5}, "factor must be at least 1, got 0.5"),
        (
            {"kind": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor must exceed low_freq_factor, got 4.0 and 4.0",
        ),
    ],
)
def test_senseless_scaling_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**fields)
