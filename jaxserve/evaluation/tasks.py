"""Texts with something to be found again, made from a seed, after RULER (arXiv 2404.06654).

RULER lets a model write and looks for the parts of the answer in what it wrote. Here an answer is right where greedy
decoding gives exactly this text, so that one pass over it tells: what is to be listed has an order that is asked for.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leo")
PLACES = ("harbour", "library", "station", "market", "garden", "museum", "bakery", "school", "bridge", "theatre")
THINGS = ("a letter", "an old map", "two loaves of bread", "a blue umbrella", "some flowers", "a box of apples")
MANY_KEYS = 4
CHAIN = 5  # variables of a chain
ASKED_WORDS = 3
COMMON_SHARES = (0.12, 0.09, 0.06)  # of a list, that its common words take; each other word appears RARE times
RARE = 3


class Question(NamedTuple):
    """What follows a text, and the answer to it, which follows that."""

    text: str
    answer: str


class Sample(NamedTuple):
    """A text, and questions about it; each is asked alone."""

    text: str
    questions: list[Question]


Task = Callable[[int, int], Sample]  # from how long the text shall be, in its own units, and a seed


def needle(length: int, seed: int, num_keys: int = 1) -> Sample:
    """The codes of `num_keys` people, at random places among `length` ordinary sentences; each is asked for."""
    rng = random.Random(seed)
    codes = {name: _code(rng) for name in rng.sample(NAMES, num_keys)}
    facts = [f"The secret code of {name} is {code}." for name, code in codes.items()]
    questions = [
        Question(f" What is the secret code of {name}? The secret code of {name} is", f" {code}")
        for name, code in codes.items()
    ]
    rng.shuffle(facts)
    return Sample(_among_sentences(facts, length, rng), questions)


def needles(length: int, seed: int) -> Sample:
    """As `needle`, with MANY_KEYS people."""
    return needle(length, seed, MANY_KEYS)


def variable_tracking(length: int, seed: int) -> Sample:
    """Two chains of CHAIN variables among `length` sentences: the first has a number, each other one is the one before.

    For either number the variables that have it are asked for.
    """
    rng = random.Random(seed)
    names = _distinct(lambda: "".join(rng.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=3)))
    chains = [(code, list(itertools.islice(names, CHAIN))) for code in (_code(rng), _code(rng))]
    facts = []
    for i in range(CHAIN):
        for code, chain in chains:
            value = code if i == 0 else f"the same as variable {chain[i - 1]}"
            facts.append(f"Variable {chain[i]} is {value}.")
    questions = [
        Question(
            f" Which {CHAIN} variables are {code}? In the order of the text, the variables that are {code} are",
            f" {', '.join(chain)}",
        )
        for code, chain in chains
    ]
    return Sample(_among_sentences(facts, length, rng), questions)


def common_words(length: int, seed: int) -> Sample:
    """A list of about `length` words, of which ASKED_WORDS are common and the others rare."""
    rng = random.Random(seed)
    made = _words(rng)
    counts = {next(made): max(RARE + ASKED_WORDS - i, round(share * length)) for i, share in enumerate(COMMON_SHARES)}
    while sum(counts.values()) < length:
        counts[next(made)] = RARE
    return _counted(counts, rng)


def frequent_words(length: int, seed: int) -> Sample:
    """A list of about `length` words, whose counts fall with the square of their rank."""
    rng = random.Random(seed)
    counts = {}
    for rank, word in enumerate(_words(rng), 1):
        count = round(0.6 * length / rank**2)  # 6 / pi^2 is what makes all of them `length`
        if rank > ASKED_WORDS and not count:
            break
        counts[word] = max(count, ASKED_WORDS + 2 - rank)
    return _counted(counts, rng)


TASKS: Mapping[str, Task] = {
    "needle": needle,
    f"needle of {MANY_KEYS}": needles,
    "variable tracking": variable_tracking,
    "common words": common_words,
    "frequent words": frequent_words,
}


def _counted(counts: dict[str, int], rng: random.Random) -> Sample:
    words = [word for word, count in counts.items() for _ in range(count)]
    rng.shuffle(words)
    most = [word for word, _ in Counter(counts).most_common(ASKED_WORDS)]
    question = f" The {ASKED_WORDS} words that appear most often in the list, the most frequent one first, are"
    return Sample(f"A list of words: {' '.join(words)}.", [Question(question, f" {', '.join(most)}")])


def _among_sentences(facts: list[str], length: int, rng: random.Random) -> str:
    """The facts in their order, at random places."""
    sentences = [
        f"{rng.choice(NAMES)} went to the {rng.choice(PLACES)} and came back with {rng.choice(THINGS)}."
        for _ in range(length)
    ]
    places = sorted(rng.choices(range(length + 1), k=len(facts)), reverse=True)
    for place, fact in zip(places, reversed(facts), strict=True):
        sentences.insert(place, fact)
    return " ".join(sentences)


def _code(rng: random.Random) -> str:
    return str(rng.randint(10000, 99999))


def _words(rng: random.Random) -> Iterator[str]:
    """Words that mean nothing, all different."""
    return _distinct(lambda: "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)))


def _distinct(make: Callable[[], str]) -> Iterator[str]:
    seen = set()
    while True:
        if (made := make()) not in seen:
            seen.add(made)
            yield made
