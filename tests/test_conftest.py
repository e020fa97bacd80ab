"""The test suite's own footing."""

import random
import threading

import hypothesis
import hypothesis.strategies as st


def test_strategies_draw_while_another_thread_takes_random_numbers():
    """Engines that warm up trace layers in threads, where beartype picks items by the global generator."""
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            random.getrandbits(32)

    @hypothesis.settings(deadline=None, max_examples=50, database=None)
    @hypothesis.given(st.text(max_size=30), st.lists(st.integers(), max_size=5))
    def draws(text: str, numbers: list[int]) -> None:
        assert len(text) <= 30
        assert len(numbers) <= 5

    thread = threading.Thread(target=take)
    thread.start()
    try:
        draws()
    finally:
        stop.set()
        thread.join()
