"""Texts with a fact to be found again, made from a seed."""

import random
from typing import NamedTuple

NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leo")
PLACES = ("harbour", "library", "station", "market", "garden", "museum", "bakery", "school", "bridge", "theatre")
THINGS = ("a letter", "an old map", "two loaves of bread", "a blue umbrella", "some flowers", "a box of apples")


class Needle(NamedTuple):
    """A text, a question about it, whose answer follows, and the answer."""

    text: str
    question: str
    answer: str


def make_needle(num_sentences: int, num_keys: int, seed: int) -> Needle:
    """The codes of `num_keys` people, at random places among ordinary sentences; one of them is asked for."""
    rng = random.Random(seed)
    names = rng.sample(NAMES, num_keys)
    codes = {name: str(rng.randint(10000, 99999)) for name in names}
    facts = [f"The secret code of {name} is {code}." for name, code in codes.items()]
    sentences = [
        f"{rng.choice(NAMES)} went to the {rng.choice(PLACES)} and came back with {rng.choice(THINGS)}."
        for _ in range(num_sentences)
    ]
    for fact in facts:
        sentences.insert(rng.randrange(len(sentences) + 1), fact)
    name = rng.choice(names)
    return Needle(
        " ".join(sentences), f" What is the secret code of {name}? The secret code of {name} is", f" {codes[name]}"
    )
