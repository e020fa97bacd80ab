"""The order of a window: a permutation, what is alike together, decode-heavy first."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.batch.order import CHARS_PER_TOKEN, MIN_SHARED_TOKENS, prefix_order, shared_len

SHARED = MIN_SHARED_TOKENS * CHARS_PER_TOKEN
prompts = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.text("ab", max_size=5)).map(lambda p: "xyzw"[p[0]] * SHARED + p[1]),
        st.tuples(st.integers(0, 3), st.integers(0, 9)).map(lambda p: [p[0]] * MIN_SHARED_TOKENS + [p[1]]),
        st.text("ab", max_size=3),
    ),
    max_size=30,
)


def beginning(prompt):
    """What a prompt of the strategy above shares with its group."""
    if isinstance(prompt, str):
        return prompt[:SHARED] if len(prompt) >= SHARED else None
    return tuple(prompt[:MIN_SHARED_TOKENS])


@given(prompts, st.data())
@settings(max_examples=150, deadline=None)
def test_the_order_is_a_permutation_that_keeps_groups_together(prompts, data):
    decode_lens = data.draw(st.lists(st.integers(1, 99), min_size=len(prompts), max_size=len(prompts)))
    order = prefix_order(prompts, decode_lens)
    assert sorted(order) == list(range(len(prompts)))
    runs = [key for key, _ in itertools.groupby(beginning(prompts[i]) for i in order) if key is not None]
    assert len(runs) == len(set(runs))


def test_groups_with_more_to_decode_for_their_prompt_go_first():
    few, many, middle = "a" * SHARED, "b" * SHARED, "c" * SHARED
    prompts = [few + "1", many + "1", middle + "1", few + "2", many + "2", middle + "2"]
    order = prefix_order(prompts, [1, 90, 10, 1, 90, 10])
    assert order == [1, 4, 2, 5, 0, 3]


def test_what_a_group_shares_counts_once():
    # Ten rows of 100 + 1 tokens with 20 to decode cost 110 for 200; alone, 101 for 20 would come after 50 for 20.
    shared = [[7] * 100 + [100 + i] for i in range(10)]
    alone = [[200 + i for i in range(50)]]
    assert prefix_order([*alone, *shared], [20] * 11) == [*range(1, 11), 0]


def test_rows_without_a_common_beginning_are_ordered_by_their_own_ratio():
    prompts = [[1] * 40, [2] * 10, [3] * 20]
    assert prefix_order(prompts, [10, 10, 10]) == [1, 2, 0]


def test_short_beginnings_in_common_make_no_group():
    header = "h" * (SHARED - 1)
    prompts = [header + letter * 200 for letter in "abcd"]
    assert prefix_order(prompts, [1, 4, 2, 3]) == [1, 3, 2, 0]


def test_groups_within_a_group_stay_together_and_are_ordered_too():
    header = "h" * SHARED
    inner = [header + letter * SHARED for letter in "ab"]
    prompts = [inner[0] + "1", inner[1] + "1", inner[0] + "2", inner[1] + "2"]
    assert prefix_order(prompts, [1, 9, 1, 9]) == [1, 3, 0, 2]


def test_equal_rows_keep_their_order():
    assert prefix_order(["same"] * 5, [3] * 5) == [0, 1, 2, 3, 4]


def test_text_and_token_ids_go_into_one_order():
    assert prefix_order(["a" * 40, [1] * 10, "b" * 80], [1, 5, 10]) == [1, 2, 0]


def test_beginnings_within_beginnings_without_end_are_no_deeper_than_the_stack():
    prompts = ["a" * (SHARED * i) for i in range(1, 600)]
    order = prefix_order(prompts, [1] * len(prompts))
    assert sorted(order) == list(range(len(prompts)))


def test_nothing_gives_nothing():
    assert prefix_order([], []) == []


@pytest.mark.parametrize("kind", [str, list])
@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
@settings(max_examples=60, deadline=None)
def test_the_shared_length_is_that_of_the_common_beginning(kind, a, b):
    assert shared_len(kind(a), kind(b)) == next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
