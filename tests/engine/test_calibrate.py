"""`jaxserve calibrate` finds what policies must know of a model."""

import itertools
import json
import re
import shlex
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import EngineDeadError, cli, weights
from jaxserve.config import EngineConfig
from jaxserve.evaluation.anchors import CHOOSES, choose_anchors, page_masses, similarity
from jaxserve.evaluation.calibrate import calibrate, changed, pass_over, products
from jaxserve.layers.sparse import DoubleSparsity, Kascade, resolve

PAGE = (Path(__file__).parents[2] / "docs" / "sparse_attention.md").read_text(encoding="utf-8")
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
TOKENS = np.random.default_rng(3).integers(3, 300, 40).tolist()


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return weights.load(tiny_model, dtype=jnp.float32, progress=False)


def products_of(loaded, token_ids):
    return np.stack([products(seen) for seen in pass_over(loaded, token_ids)])


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
    np.testing.assert_allclose(products_of(loaded, TOKENS)[0], expected, rtol=1e-4)


def test_the_largest_channels_come_first_and_pieces_count_alike(loaded):
    done = []
    on_progress = lambda i, count: done.append((i, count))  # noqa: E731
    found = calibrate(loaded, "double_sparsity", TOKENS, window=16, num_channels=3, on_progress=on_progress)
    assert done == [(i, len(TOKENS) // 16) for i in range(len(TOKENS) // 16 + 1)]
    total = products_of(loaded, TOKENS[:16]) + products_of(loaded, TOKENS[16:32])
    assert found["policy"] == "double_sparsity"
    assert np.shape(found["channels"]) == (*total.shape[:2], 3)
    for of_head, channels in zip(
        total.reshape(-1, total.shape[2]), np.reshape(found["channels"], (-1, 3)), strict=True
    ):
        assert channels.tolist() == sorted(range(len(of_head)), key=lambda c: -of_head[c])[:3]


def test_importance_is_how_far_attention_turns_the_input(loaded):
    first = next(pass_over(loaded, TOKENS))
    x = np.asarray(loaded.params["embed"], np.float64)[TOKENS]
    np.testing.assert_array_equal(first.x, x.astype(np.float32))
    y = x + np.asarray(first.attended, np.float64)
    cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(changed(first), 1 - np.mean(cosines), rtol=1e-4)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_masses_and_similarity_are_those_of_the_definition(soft_cap):
    rng = np.random.default_rng(5)
    T, K, G, H, L, size = 90, 2, 2, 4, 3, 8
    q, k = rng.standard_normal((L, T, K, G, H)), rng.standard_normal((L, T, K, H))
    masses = np.zeros((L, T, K, -(-T // size)))
    for layer, t, h, g in np.ndindex(L, T, K, G):
        scores = 0.7 * (k[layer, : t + 1, h] @ q[layer, t, h, g])
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        p = np.exp(scores) / np.exp(scores).sum()
        for s in range(t + 1):
            masses[layer, t, h, s // size] += p[s]
    found = [np.asarray(page_masses(*map(jnp.float32, x), 0.7, soft_cap, size)) for x in zip(q, k, strict=True)]
    np.testing.assert_allclose(found, masses, rtol=1e-4, atol=1e-6)

    def choice(layer, t, h):
        own, count = t // size, CHOOSES.least // size
        return {own, *sorted(range(own), key=lambda page: -masses[layer, t, h, page])[: count - 1]}

    alike = similarity(found, size)
    for i, j, h, g in np.ndindex(L, L, K, K):
        shares = [
            sum(masses[j, t, h, page] for page in choice(i, t, g))
            / sum(masses[j, t, h, page] for page in choice(j, t, h))
            for t in range(T)
        ]
        assert alike[i, j, h, g] == pytest.approx(min(shares) if i <= j else 0.0, rel=1e-4)


@pytest.mark.parametrize("num_anchors", [1, 2, 3, 6])
def test_anchors_are_the_best_of_all_choices(num_anchors):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        alike, importance = rng.random((6, 6, 2, 2)), rng.random(6)

        def total(anchors, alike=alike, importance=importance):
            last = [max(a for a in anchors if a <= layer) for layer in range(6)]
            return sum(importance[j] * np.mean([max(alike[a, j, h]) for h in range(2)]) for j, a in enumerate(last))

        choices = [(0, *rest) for rest in itertools.combinations(range(1, 6), num_anchors - 1)]
        anchors, heads = choose_anchors(alike, importance, num_anchors)
        assert tuple(anchors) == max(choices, key=total)
        for layer, follows in enumerate(heads):
            last = max(a for a in anchors if a <= layer)
            assert follows == [int(alike[last, layer, h].argmax()) for h in range(2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "quest"}, r"policy must be one that is calibrated, \['double_sparsity', 'kascade'\], got 'quest'"),
        ({"window": 64}, "text must have at least 64 tokens, got 40"),
        ({"policy": "kascade", "num_anchors": 9}, "num_anchors must be within the model's 3 layers, got 9"),
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
    anchored = [*command[:-1], "anchors.json", "--policy", "kascade", "--num-anchors", "2"]
    assert cli.run(anchored) == 0
    policy = resolve(Path("anchors.json").read_text(encoding="utf-8")).decode
    assert isinstance(policy, Kascade)
    assert (len(policy.anchors), len(policy.heads)) == (2, loaded.model.config.num_layers)
    capsys.readouterr()
    monkeypatch.setattr("jaxserve.cli.engine.start", stop)
    assert cli.run([written if part == "$(cat labels.json)" else part for part in shlex.split(uses)[1:]]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: as far as the engine"
    assert cli.run([*command[:-1], "nowhere/x.json"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert cli.run([*command[:-1], "x.json", "--policy", "quest"]) == 2
    assert "policy must be one that is calibrated" in capsys.readouterr().err
