"""The model of a step's time: exact on what is linear, robust against what is not."""

import random

import pytest

from jaxserve.scheduler.step_time import NUM_ENOUGH, StepTimeModel, StepWork

TRUE = (0.004, 12e-6, 1.1e-8, 20e-6 * 1.0, 5e-10, 0.006)  # of an 8B model on one GPU, in round numbers


def true_seconds(work):
    return sum(c * f for c, f in zip(TRUE, work.features(), strict=True))


def random_work(rng):
    rows = rng.randint(0, 256)
    work = StepWork(rows, rows * rng.randint(100, 4000))
    if rng.random() < 0.4:
        tokens = rng.randint(16, 8192)
        return work._replace(
            num_prefill_tokens=tokens, num_pairs=tokens**2 / 2, share=rng.choice([1, 0.5, 0.25, 0.125])
        )
    return work


def trained(num_steps, noise=0.0, stalls=0.0):
    rng, model = random.Random(0), StepTimeModel()
    for _ in range(num_steps):
        work = random_work(rng)
        seconds = true_seconds(work) * (1 + noise * rng.gauss(0, 1))
        model.observe(work, seconds * (100 if rng.random() < stalls else 1))
    return model


def errors(model):
    rng = random.Random(1)
    works = [random_work(rng) for _ in range(200)]
    return [abs(model.seconds(work) / true_seconds(work) - 1) for work in works]


@pytest.mark.parametrize(
    ("noise", "stalls", "bound"),
    [(0.0, 0.0, 1e-3), (0.05, 0.0, 0.12), (0.0, 0.05, 0.1)],
    ids=["exact", "noise", "stalls"],
)
def test_it_predicts_steps_that_it_has_not_seen(noise, stalls, bound):
    found = sorted(errors(trained(800, noise, stalls)))
    assert found[190] < bound


def test_it_says_nothing_before_it_has_seen_prompts():
    model = StepTimeModel()
    work = StepWork(4, 100, 64, 2048.0, 1.0)
    for _ in range(50):
        model.observe(StepWork(4, 100), 0.01)
    for _ in range(NUM_ENOUGH):
        assert model.seconds(work) is None
        model.observe(work, 0.02)
    assert model.seconds(work) == pytest.approx(0.02, rel=0.1)


def test_it_follows_a_change_and_long_spells_of_decoding_do_not_wipe_out_what_prompts_cost():
    model = trained(400)
    prompt = StepWork(64, 64_000, 4096, 4096**2 / 2, 0.25)
    before = model.seconds(prompt)
    for _ in range(5000):
        model.observe(StepWork(64, 64_000), true_seconds(StepWork(64, 64_000)))
    assert model.seconds(prompt) == pytest.approx(before, rel=0.1)
    for _ in range(5000):
        model.observe(StepWork(64, 64_000), 0.02)
    assert model.seconds(StepWork(64, 64_000)) == pytest.approx(0.02, rel=0.2)  # prompts were not seen since


def test_more_work_never_takes_less_time():
    model = trained(300, noise=0.3)
    assert all(coefficient >= 0 for coefficient in model.coefficients)
