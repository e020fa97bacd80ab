"""`jaxserve calibrate` finds what policies must know of a model."""

import json
import re
import shlex
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import EngineDeadError, cli, weights
from jaxserve.config import EngineConfig
from jaxserve.evaluation.calibrate import calibrate, products_by_layer
from jaxserve.layers.sparse import DoubleSparsity

PAGE = (Path(__file__).parents[2] / "docs" / "sparse_attention.md").read_text(encoding="utf-8")
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
TOKENS = np.random.default_rng(3).integers(3, 300, 40).tolist()


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return weights.load(tiny_model, dtype=jnp.float32, progress=False)


def rotated(x, frequencies):
    """Of [T, heads, H], as the papers have it: channel d turns with channel d + H / 2."""
    angle = np.arange(x.shape[0])[:, None, None] * frequencies
    low, high = np.split(x, 2, axis=2)
    return np.concatenate(
        [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], axis=2
    )


def test_the_products_are_those_of_queries_with_their_own_keys(loaded):
    model, params = loaded.model, loaded.params
    spec = model.attention_spec("full")
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params["layers"][0].items()}
    x = np.asarray(params["embed"], np.float64)[TOKENS]
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + model.config.rms_norm_eps) * p["input_norm"]
    heads = (x @ p["qkv"].T).reshape(len(TOKENS), -1, spec.head_dim)
    N, K = spec.num_heads, spec.num_kv_heads
    q, k = (rotated(part, np.asarray(spec.frequencies)) for part in (heads[:, :N], heads[:, N : N + K]))
    expected = np.abs(q.reshape(len(TOKENS), K, N // K, -1) * k[:, :, None]).mean(axis=(0, 2))
    np.testing.assert_allclose(products_by_layer(loaded, TOKENS)[0], expected, rtol=1e-4)


def test_the_largest_channels_come_first_and_pieces_count_alike(loaded):
    found = calibrate(loaded, "double_sparsity", TOKENS, window=16, num_channels=3)
    total = np.stack(products_by_layer(loaded, TOKENS[:16])) + np.stack(products_by_layer(loaded, TOKENS[16:32]))
    assert found["policy"] == "double_sparsity"
    assert np.shape(found["channels"]) == (*total.shape[:2], 3)
    for products, channels in zip(
        total.reshape(-1, total.shape[2]), np.reshape(found["channels"], (-1, 3)), strict=True
    ):
        assert channels.tolist() == sorted(range(len(products)), key=lambda c: -products[c])[:3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "quest"}, r"policy must be one that is calibrated, \['double_sparsity'\], got 'quest'"),
        ({"window": 64}, "text must have at least 64 tokens, got 40"),
        ({"num_channels": 0}, "num_channels must be within the head's .*, got 0"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(loaded, options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(loaded, **({"policy": "double_sparsity", "token_ids": TOKENS, "window": 16} | options))


def test_the_commands_of_the_documentation_calibrate_and_use_it(tiny_model, loaded, tmp_path, monkeypatch, capsys):
    def stop(options):
        policy = EngineConfig.of(**options).runtime.sparse.decode
        assert isinstance(policy, DoubleSparsity)
        assert len(policy.channels) == loaded.model.config.num_layers
        raise EngineDeadError("as far as the engine")

    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT, encoding="utf-8")
    calibrates, uses = re.findall(r"^jaxserve (?:calibrate|generate .*labels).*", PAGE, flags=re.MULTILINE)
    command = shlex.split(calibrates.replace("smollm2-135m", tiny_model))[1:]
    assert cli.run(command) == 0
    assert capsys.readouterr().out == "wrote labels.json\n"
    written = Path("labels.json").read_text(encoding="utf-8")
    assert json.loads(written)["policy"] == "double_sparsity"
    monkeypatch.setattr("jaxserve.cli.engine.start", stop)
    assert cli.run([written if part == "$(cat labels.json)" else part for part in shlex.split(uses)[1:]]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: as far as the engine"
    assert cli.run([*command[:-1], "x.json", "--policy", "quest"]) == 2
    assert "policy must be one that is calibrated" in capsys.readouterr().err
