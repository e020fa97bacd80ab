"""Short ways to a simulation and its requests."""

import itertools

from simulation import NUM_LAYERS, Setup, Simulation

from jaxserve.scheduler import LayeredPrefill, PagePool, Request, Scheduler, SchedulerConfig, StepResult

ids = itertools.count(1000)


class Script(Simulation):
    """A simulation with the words of scripted tests."""

    def add_all(self, *requests: Request) -> None:
        for each in requests:
            assert self.add(each)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def drain_requests(self) -> None:
        """Runs until no request is left and nothing is in flight; unlike `drain`, keeps what is cached."""
        while self.scheduler.has_unfinished() or self.in_flight:
            self.step()


def make(*, pages_per_rank=32, page_size=4, num_ranks=1, overlap=True, prefix_caching=True, **config) -> Script:
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64} | config
    return Script(
        Setup(
            config=SchedulerConfig(**config),
            pages_per_rank=pages_per_rank,
            page_size=page_size,
            num_ranks=num_ranks,
            overlap=overlap,
            prefix_caching=prefix_caching,
            layered=lambda config, rng: LayeredPrefill(config, NUM_LAYERS),
        )
    )


def request(prompt, *, max_tokens=4, eos_token_ids=frozenset(), **options) -> Request:
    """Ends by length unless told otherwise, so that tests can count its steps."""
    options = {"request_id": next(ids), "sampling": 0} | options
    return Request(prompt_token_ids=list(prompt), max_tokens=max_tokens, eos_token_ids=eos_token_ids, **options)


def bare(**config) -> Scheduler:
    """A scheduler whose tokens the test chooses itself."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64} | config
    return Scheduler(SchedulerConfig(**sizes), PagePool(32, 4))


def take(scheduler, plan, *token_ids, **more):
    return scheduler.commit(plan, StepResult(token_ids=list(token_ids), **more), 0.0)
