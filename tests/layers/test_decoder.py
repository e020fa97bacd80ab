import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import GEMMA, LLAMA, MOE, make, page_table, rows_and_cache, step

from jaxserve.layers.decoder import forward, run_layers, stack_layers
from jaxserve.layers.kv_cache import init_kv_cache
from jaxserve.models import get_model

MODELS = pytest.mark.parametrize("hf", [LLAMA, GEMMA], ids=["one_kind", "two_kinds"])
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 32]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def jitted(model, params):
    return jax.jit(rows_and_cache(model, params), static_argnames="span")


@MODELS
def test_chunks_and_decodes_give_what_the_whole_prompt_gives(hf):
    model, params, kv = make(hf)
    table = page_table(2)
    run = jitted(model, params)
    whole, _ = run(kv, step([], [(0, PROMPT)], table))
    first, kv_cut = run(kv, step([], [(0, PROMPT[:6])], table))
    second, kv_cut = run(kv_cut, step([], [(6, PROMPT[6:10])], table))
    last, _ = run(kv_cut, step([(PROMPT[10], 10)], [], table))
    np.testing.assert_allclose(jnp.concatenate([first, second, last]), whole, **TOLERANCE)
    late, _ = run(kv_cut, step([(PROMPT[10], 9)], [], table))
    assert not np.allclose(late, last, **TOLERANCE)


@MODELS
def test_both_regions_in_one_step_give_what_they_give_alone(hf):
    model, params, kv = make(hf)
    table = page_table(3)
    run = jitted(model, params)
    _, kv = run(kv, step([], [(0, PROMPT[:5]), (0, PROMPT[2:9])], table))
    decodes, prompt = [(1, 5), (2, 7)], [(0, PROMPT)]
    mixed, mixed_kv = run(kv, step(decodes, prompt, table))
    alone, kv = run(kv, step(decodes, [], table))
    prefill, kv = run(kv, step([], prompt, table[2:]))
    np.testing.assert_allclose(mixed, jnp.concatenate([alone, prefill]), **TOLERANCE)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **TOLERANCE), mixed_kv, kv)


@pytest.mark.parametrize(("cuts", "stacked"), [((0, 3, 5), False), ((0, 1, 4, 5), True)])
def test_prefill_rows_may_pass_the_layers_span_by_span_beside_decodes(cuts, stacked):
    model, params, kv = make(GEMMA)
    table = page_table(3)
    if stacked:
        params = params | {"layers": stack_layers(params["layers"], model.layer_kinds)}
    run = jitted(model, params)
    _, kv = run(kv, step([], [(0, PROMPT[:5]), (0, PROMPT[2:9])], table))
    whole, _ = run(kv, step([(1, 5), (2, 7)], [(0, PROMPT)], table))
    frontier = None
    for i, span in enumerate(itertools.pairwise(cuts)):
        decodes = [(1, 5 + i), (2, 7 + i)]
        out, kv = run(kv, step(decodes, [(0, PROMPT)], table), span=span, frontier=frontier)
        if i == 0:
            np.testing.assert_allclose(out[:2], whole[:2], **TOLERANCE)
        frontier = out[2:]
        if span[1] < 5:
            assert not np.allclose(frontier, whole[2:], **TOLERANCE)
    np.testing.assert_allclose(frontier, whole[2:], **TOLERANCE)


def test_a_span_above_layer_0_needs_a_frontier():
    model, params, kv = make(LLAMA)
    with pytest.raises(AssertionError, match="need their frontier"):
        forward(model, params, kv, step([], [(0, PROMPT)], page_table(1)), span=(3, 5))


@pytest.mark.parametrize("kinds", ["aaaaaaaaaa", "ababababa", "aabaabaab", "abcab", "aaab", "a"])
def test_stacks_and_tuples_visit_the_same_layers_in_the_same_order(kinds):
    layers = tuple({"w": jnp.asarray(i)} for i in range(len(kinds)))

    def body(kind, p, index, visits):
        return [*visits, (int(p["w"]), int(index), ord(kind))]

    stacks = stack_layers(layers, kinds)
    for lo, hi in itertools.combinations_with_replacement(range(len(kinds) + 1), 2):
        expected = [(i, kinds[:i].count(kinds[i]), ord(kinds[i])) for i in range(lo, hi)]
        with jax.disable_jit():  # loops run as Python loops
            assert run_layers(body, layers, kinds, lo, hi, []) == expected
            assert run_layers(body, stacks, kinds, lo, hi, []) == expected


def test_the_stacked_form_is_one_loop_whatever_the_number_of_layers():
    model, params, kv = make(LLAMA | {"num_hidden_layers": 24})
    params = params | {"layers": stack_layers(params["layers"], model.layer_kinds)}
    text = jax.jit(functools.partial(forward, model)).lower(params, kv, step([(1, 5)], [], page_table(1))).as_text()
    assert text.count("stablehlo.dot_general") < 4 * 8  # 6 a layer, 4 layers a turn


def test_layers_in_a_tuple_are_traced_once():
    model, params, kv = make(LLAMA)
    traces = 0

    def counting(*args):
        nonlocal traces
        traces += 1
        return model.layer_fn(*args)

    forward(dataclasses.replace(model, layer_fn=counting), params, kv, step([(1, 5)], [], page_table(1)))
    assert traces == 1


@pytest.mark.parametrize("rows", ["decode", "prefill"])
def test_neither_the_cache_nor_the_weights_are_copied(rows):
    """At a size where a copy shows: the demo model's width, and a cache of 50 MB a layer."""
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = get_model(LLAMA | shape | {"num_hidden_layers": 4, "vocab_size": 1000})
    params = model.abstract_params(jnp.bfloat16)
    kv = jax.eval_shape(lambda: init_kv_cache(model.config, num_pages=32 * 256 + 1, page_size=8, dtype=jnp.bfloat16))
    table = np.zeros((16, 256), np.int32)
    batch = step([(1, 0)] * 16, [], table) if rows == "decode" else step([], [(0, [1] * 128)], table)
    run = jax.jit(functools.partial(forward, model), donate_argnums=1)
    memory = run.lower(params, kv, batch).compile().memory_analysis()
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kv))
    assert cache_bytes > 190e6
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < 6e6  # one layer's weights are 7 MB


def padded_step(decode: list[bool], num_prefill: int, num_real: int):
    """Token 3 where a row is padding, and tokens below 3 elsewhere; one prompt."""
    tokens = [j % 3 if j < num_real else 3 for j in range(num_prefill)]
    batch = step([(s % 3 if is_real else 3, s) for s, is_real in enumerate(decode)], [(0, tokens)], page_table(4))
    assert batch.decode is not None
    assert batch.prefill is not None
    rows = jnp.asarray([*decode, *(j < num_real for j in range(num_prefill))])
    return dataclasses.replace(
        batch,
        page_ids=jnp.where(rows, batch.page_ids, 0),
        decode=dataclasses.replace(batch.decode, kv_lens=jnp.where(rows[: len(decode)], batch.decode.kv_lens, 0)),
        prefill=dataclasses.replace(
            batch.prefill, kv_lens=jnp.asarray([num_real]), cu_q_lens=jnp.asarray([0, num_real])
        ),
    )


@pytest.mark.parametrize(("stacked", "num_real"), [(False, 5), (True, 0)])
def test_padding_rows_pick_no_expert_in_any_region_and_span(stacked, num_real):
    """Token k picks expert k, in every layer: what attention and experts add to it is small. Expert 3 is not a number,
    nor any where nothing is real.
    """
    decode = [num_real > 0, False, num_real > 0]
    model, params, kv = make(MOE)
    kv = jax.tree.map(jnp.zeros_like, kv)
    params = params | {"embed": 10.0 * jnp.eye(*params["embed"].shape)}
    poison = jnp.where(jnp.arange(4) >= min(num_real, 3), jnp.nan, 1e-3)[:, None, None]
    layers = [
        p | {"router": jnp.eye(*p["router"].shape), "o": 1e-3 * p["o"], "down": poison * p["down"]}
        for p in params["layers"]
    ]
    params = params | {"layers": stack_layers(layers, model.layer_kinds) if stacked else tuple(layers)}
    batch, run = padded_step(decode, 8, num_real), jitted(model, params)
    whole, _ = run(kv, batch)
    assert np.isfinite(whole).all()
    assert int(jnp.argmax(whole[0])) == (0 if num_real else 3)
    frontier, rows = None, whole
    for span in ((0, 1), (1, 2)):
        rows, kv = run(kv, batch, span=span, frontier=frontier)
        assert np.isfinite(rows).all(), span
        frontier = rows[3:]
    np.testing.assert_allclose(rows[3:], whole[3:], **TOLERANCE)
    longer = dataclasses.replace(batch.prefill, kv_lens=jnp.asarray([8]), cu_q_lens=jnp.asarray([0, 8]))
    assert np.isnan(run(kv, dataclasses.replace(batch, prefill=longer))[0][-1]).all()  # now its expert is read


def test_real_rows_are_those_of_a_sequence():
    for decode, num_real in (([True, False, True], 5), ([False], 0)):
        real = padded_step(decode, 8, num_real).real_rows()
        np.testing.assert_array_equal(real, [*decode, *(j < num_real for j in range(8))])
    batch = step([(1, 5), (2, 7)], [], page_table(2))
    assert batch.decode is not None
    speculative = dataclasses.replace(batch.decode, kv_lens=jnp.asarray([0, 9]), max_q_len=2)
    real = dataclasses.replace(batch, token_ids=jnp.zeros(4, jnp.int32), decode=speculative).real_rows()
    np.testing.assert_array_equal(real, [False, False, True, True])
