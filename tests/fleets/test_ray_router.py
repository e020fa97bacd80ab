"""Where requests go that begin alike."""

from jaxserve.ray.router import CHUNK, PrefixHomes, beginnings


def test_the_home_of_the_longest_known_beginning_is_first():
    homes = PrefixHomes()
    homes.record("a" * 2 * CHUNK, "short")
    homes.record("a" * CHUNK + "b" * CHUNK, "long")
    idle = {"other": 0, "short": 0, "long": 0}
    assert homes.order("a" * CHUNK + "b" * CHUNK + "tail", idle, 0)[0] == "long"
    assert homes.order("a" * 3 * CHUNK, idle, 0)[0] == "short"
    assert homes.order("a" * CHUNK + "c" * CHUNK, idle, 0)[0] == "long"  # the last that served the first chunk
    assert homes.order("b" * CHUNK, idle, 0) == ["other", "short", "long"]


def test_a_home_that_is_too_busy_gives_way_to_the_least_loaded():
    homes = PrefixHomes()
    homes.record([7] * CHUNK, "home")
    assert homes.order([7] * CHUNK, {"home": 5, "x": 2, "y": 1}, 4) == ["home", "y", "x"]
    assert homes.order([7] * CHUNK, {"home": 6, "x": 2, "y": 1}, 4) == ["y", "x", "home"]


def test_a_home_that_is_gone_is_passed_over():
    homes = PrefixHomes()
    homes.record("a" * CHUNK, "old")
    homes.record("a" * 2 * CHUNK, "gone")
    assert homes.order("a" * 2 * CHUNK, {"old": 0, "new": 0}, 4) == ["old", "new"]
    homes.record("a" * CHUNK, "new")
    assert homes.order("a" * 2 * CHUNK, {"old": 0, "new": 0}, 4) == ["new", "old"]


def test_beginnings_are_whole_chunks_and_depend_on_all_before():
    assert len(list(beginnings("x" * (3 * CHUNK - 1)))) == 2
    assert list(beginnings("x" * CHUNK + "y" * CHUNK))[1] != list(beginnings("z" * CHUNK + "y" * CHUNK))[1]
    assert list(beginnings([1] * CHUNK)) == list(beginnings([1] * (CHUNK + 1)))[:1]
    assert list(beginnings("hi")) != list(beginnings("ho"))


def test_the_least_recently_used_beginning_is_forgotten():
    homes = PrefixHomes(capacity=2)
    for name in "abc":
        homes.record(name * CHUNK, name)
    assert homes.order("a" * CHUNK, {"x": 0, "a": 1}, 4) == ["x", "a"]
    assert homes.order("c" * CHUNK, {"x": 0, "c": 1}, 4) == ["c", "x"]
