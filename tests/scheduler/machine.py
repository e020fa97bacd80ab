"""The hypothesis state machine: random set-ups, requests and interruptions over the simulation."""

import collections
import random

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from simulation import EOS, STOP, Setup, Simulation

from jaxserve.scheduler import PagePool, Request, Scheduler, SchedulerConfig

AGAIN = ("prompt_token_ids", "max_tokens", "eos_token_ids", "cache_salt", "adapter", "sampling")
PREFIXES = ([], [2, 3, 4, 5], [2, 3, 4, 5, 6, 7, 8, 9, 2, 2], [9] * 16)


@st.composite
def setups(draw):
    chunked = draw(st.sampled_from([True, True, False]))
    max_model_len = draw(st.sampled_from([8, 20, 32]))
    max_num_seqs = draw(st.integers(1, 5))
    budget = draw(st.integers(max_num_seqs + 1, 12)) if chunked else max_model_len + draw(st.integers(0, 9))
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        max_prefill_seqs=draw(st.integers(1, 3)),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])) if chunked else 0,
        max_num_queued_reqs=draw(st.sampled_from([None, None, 3])),
        reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.3])),
        prioritize_prefill=draw(st.booleans()),
        share_answers=draw(st.sampled_from([True, True, False])),
        padded_decode_rows=draw(st.sampled_from([(), (0, budget // 4, budget // 2)])),
        prefill=(prefill := draw(st.sampled_from(["chunked", "layered", "auto"])) if chunked else "chunked"),
        prefill_order="fcfs" if prefill == "chunked" else draw(st.sampled_from(["fcfs", "shortest", "slack"])),
    )
    return Setup(
        config=config,
        pages_per_rank=draw(st.integers(4, 10)),
        page_size=draw(st.sampled_from([1, 2, 4])),
        num_ranks=draw(st.sampled_from([1, 1, 2])),
        overlap=draw(st.booleans()),
        prefix_caching=draw(st.integers(0, 4)) > 0,
        stalls=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


def random_options(rng):
    """Options of `Request`, from a seed rather than drawn one by one: hypothesis' choices cost more than the steps."""
    max_tokens = rng.randint(1, 14)
    return dict(
        prompt_token_ids=rng.choice(PREFIXES) + [rng.randint(2, 4) for _ in range(rng.randint(0, 4))],
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, min(3, max_tokens)]),
        eos_token_ids=rng.choice([frozenset([EOS]), frozenset()]),
        stop_token_ids=rng.choice([frozenset(), frozenset([STOP, EOS])]),
        arrival_time=rng.random() / 200,
        priority=rng.randint(0, 2),
        deadline=rng.choice([None, None, None, 1.0, 4.0]),
        cache_salt=rng.choice([None, None, None, "a", "b"]),
        adapter=rng.choice([None, None, None, "a"]),
        skip_reading_prefix_cache=rng.random() < 0.1,
        held=rng.random() < 0.1,
        sampling=rng.randint(0, 99),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """`machine` makes the classes that tests run."""

    scheduler_class: type[Scheduler]
    pool_class: type[PagePool]
    seen: collections.Counter  # over all runs of the class

    @initialize(setup=setups())
    def start(self, setup):
        self.sim = Simulation(setup, self.scheduler_class, self.pool_class)
        self.num_added = 0

        self.add(6, setup.seed)

    @rule(num_requests=st.integers(1, 6), seed=st.integers(0, 2**32))
    def add(self, num_requests, seed):
        rng = random.Random(seed)
        for _ in range(num_requests):
            self._add(rng.choice([1, 1, 1, 3]), random_options(rng))

    def _add(self, num_samples, options):
        if options.get("deadline"):
            options = options | {"deadline": self.sim.now + options["deadline"]}
        leader = None
        for i in range(num_samples):
            self.num_added += 1
            seed = options["sampling"] + i
            sample = Request(**options | {"request_id": self.num_added, "leader": leader, "sampling": seed})
            if not self.sim.add(sample):
                return
            leader = leader or sample

    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps):
        for _ in range(num_steps):
            self.sim.step()

    @rule(num_steps=st.integers(10, 30))
    def run_on(self, num_steps):
        self.run(num_steps)

    @rule()
    def half_a_step(self):
        if len(self.sim.in_flight) <= self.sim.setup.overlap:
            self.sim.dispatch()
        else:
            self.sim.commit()

    @rule(how=st.sampled_from(["abort", "retry", "stop string", "next turn"]), which=st.integers(0, 5))
    def interrupt(self, how, which):
        """Prompts in progress first. A request whose deadline passed but was not reported yet is left alone."""
        prefilling = self.sim.scheduler.running.prefilling
        requests = [request for request in self.sim.live if request.finish_reason is None]
        requests.sort(key=lambda request: request not in prefilling)
        if not requests:
            return
        request = requests[which % len(requests)]
        if how in ("abort", "retry"):
            self.sim.finish(request, "abort")
        else:
            self.sim.finish(request, "stop", "###")
        again = {name: getattr(request, name) for name in AGAIN}
        if how == "next turn":
            again["prompt_token_ids"] = request.prompt_token_ids + request.output_token_ids + [2]
        if how in ("retry", "next turn"):
            self._add(1, again)

    @rule(which=st.integers(0, 5))
    def release(self, which):
        held = self.sim.held()
        if held:
            self.sim.release(held[which % len(held)])

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds):
        self.sim.now += seconds
        if seconds == 3.0:
            idle = self.sim.pool.num_held == 0
            assert self.sim.scheduler.reset_prefix_cache() == idle

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.drain()
            self.seen.update(self.sim.seen)


def machine(scheduler=Scheduler, pool=PagePool) -> type[SchedulerMachine]:
    """The machine over this scheduler and pool: the real ones, or ones with a fault planted."""
    members = {"scheduler_class": scheduler, "pool_class": pool, "seen": collections.Counter()}
    return type("Machine", (SchedulerMachine,), members)


def run(tested: type[SchedulerMachine], **options) -> None:
    common = {"stateful_step_count": 30, "deadline": None, "report_multiple_bugs": False}
    run_state_machine_as_test(tested, settings=settings(suppress_health_check=list(HealthCheck), **common, **options))
