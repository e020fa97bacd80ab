"""Step records and profiles of the real engine, in process and in its own process."""

import asyncio
import itertools
import re
import time
from pathlib import Path

import pytest
from jax.profiler import ProfileData

import jaxserve
from jaxserve import LLM, AsyncLLM, RequestError, SamplingParams
from jaxserve.server.metrics import COUNTERS, GAUGES, HISTOGRAMS, engine_families

OPTIONS = {"dtype": "float32", "max_model_len": 128, "page_size": 8, "max_num_batched_tokens": 64, "warm_up": "off"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def async_llm(tiny_model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        llm = AsyncLLM(tiny_model, **OPTIONS, num_pages=100, max_num_seqs=4)
    yield llm
    llm.shutdown()


async def generate(llm, name="r"):
    return [output async for output in llm.generate("The quick brown", GREEDY, name)][-1]


# As an error this warning, at the first look at an event's stats, takes the interpreter down (jaxlib 0.12).
reads_stats = pytest.mark.filterwarnings("ignore:builtin type event_stats has no __module__:DeprecationWarning")


def profiled_steps(directory) -> list[int]:
    """Numbers of the engine's steps in the one profile below `directory`."""
    (file,) = directory.rglob("*.xplane.pb")
    data = ProfileData.from_file(str(file))  # which its parts do not keep alive
    return [
        dict(event.stats)["step_num"]
        for plane in data.planes
        for line in plane.lines
        for event in line.events
        if event.name == "step"
    ]


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_records_agree_with_the_counters(make_llm, async_scheduling):
    llm, before = make_llm(async_scheduling=async_scheduling), time.monotonic()
    prompts = [[5] * 90, [6] * 20, [7] * 3]
    llm.generate(prompts, GREEDY, use_tqdm=False)
    steps, metrics = llm.recent_steps(), llm.get_metrics()
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert metrics["jaxserve:num_steps"] == len(steps)
    assert metrics['jaxserve:iteration_tokens_bucket{le="+Inf"}'] == len(steps)
    assert sum(step.num_new_tokens for step in steps) == metrics["jaxserve:generation_tokens"] == 3 * 6
    assert sum(step.num_prefill_tokens for step in steps) == sum(map(len, prompts))
    computed = sum(step.num_decode_rows + step.num_prefill_tokens for step in steps)
    assert computed == metrics["jaxserve:iteration_tokens"]
    assert {(step.layer_lo, step.layer_hi) for step in steps if step.num_prefill_rows} == {(0, 3)}
    assert {(step.layer_lo, step.layer_hi) for step in steps if not step.num_prefill_rows} == {(0, 0)}
    assert max(step.num_requests_running for step in steps) == 3
    assert max(step.kv_cache_usage for step in steps) > 0
    assert steps[0].start_time >= before
    assert steps[-1].end_time <= time.monotonic()
    assert all(one.end_time <= next_one.start_time for one, next_one in itertools.pairwise(steps))
    assert llm.recent_steps(since=steps[-2].step) == steps[-1:]


def test_records_cross_from_the_engines_process(async_llm):
    async def main():
        before = time.monotonic()
        output = await generate(async_llm)
        steps = await async_llm.recent_steps()
        assert sum(step.num_new_tokens for step in steps) == len(output.outputs[0].token_ids) == 6
        assert before <= steps[0].start_time < steps[-1].end_time <= time.monotonic()  # one clock for both processes
        assert await async_llm.recent_steps(since=steps[-1].step) == []
        for bad, error in (("1", TypeError), (1 << 70, RequestError)):
            with pytest.raises(error):
                await async_llm.recent_steps(since=bad)
        await generate(async_llm)

    asyncio.run(main())


def test_gaps_between_tokens_are_kept(llm):
    (output,) = llm.generate([5, 6, 7], SamplingParams(n=2, max_tokens=5, ignore_eos=True, seed=1), use_tqdm=False)
    times = output.metrics
    assert times.num_generation_tokens == 10
    assert len(times.inter_token_latencies) == 8
    (output,) = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    times = output.metrics
    assert sum(times.inter_token_latencies) == pytest.approx(times.last_token_time - times.first_token_time)


@reads_stats
def test_a_profile_of_the_engine_in_process(llm, tmp_path):
    last = llm.recent_steps()[-1].step
    llm.start_profile(tmp_path / "new" / "profile")
    with pytest.raises(RequestError, match=r"cannot profile into .*already"):
        llm.start_profile(tmp_path)
    llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    llm.stop_profile()
    assert profiled_steps(tmp_path / "new") == [step.step for step in llm.recent_steps(since=last)]
    with pytest.raises(RequestError, match="cannot end the profile"):
        llm.stop_profile()


@reads_stats
def test_a_profile_of_the_engines_own_process(async_llm, tmp_path):
    async def main():
        (tmp_path / "file").touch()
        with pytest.raises(RequestError, match=r"cannot profile into .*file"):
            await async_llm.start_profile(tmp_path / "file")
        last = (await async_llm.recent_steps())[-1].step
        await async_llm.start_profile(tmp_path / "profile")
        await generate(async_llm)
        await async_llm.stop_profile()
        with pytest.raises(RequestError, match="cannot end the profile"):
            await async_llm.stop_profile()
        return [step.step for step in await async_llm.recent_steps(since=last)]

    steps = asyncio.run(main())
    assert profiled_steps(tmp_path / "profile") == steps


def test_every_counter_of_the_engine_is_exported_to_prometheus(llm):
    values = llm.get_metrics()
    exported = {sample.name for family in engine_families(values, "m") for sample in family.samples}
    lacking = [name for name in values if not exported & {stem := name.split("{")[0], f"{stem}_total"}]
    # The one histogram goes by vLLM's name there.
    assert [name for name in lacking if not name.startswith("jaxserve:iteration_tokens")] == []
    assert {f"jaxserve:iteration_tokens_total_{part}" for part in ("bucket", "sum", "count")} <= exported


PAGE = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")


def test_the_example_of_the_documentation_runs(tiny_model, monkeypatch, capsys):
    example = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    monkeypatch.setattr(jaxserve, "LLM", lambda *_, **__: LLM(tiny_model, **OPTIONS, num_pages=100))
    exec(compile(example, "observability.md", "exec"), {})
    *steps, num_tokens = capsys.readouterr().out.splitlines()
    assert 1 <= int(num_tokens) <= 8
    assert len(steps) >= int(num_tokens)
    assert steps[0].endswith("(0, 3)")


def test_the_documentation_lists_every_metric():
    listed = set(re.findall(r"`(\w+)`", "".join(line for line in PAGE.splitlines() if line.startswith("| `"))))
    by_label = {"request_success", "iteration_tokens_total"}
    assert listed - {"finished_reason"} == {*GAUGES, *COUNTERS, *HISTOGRAMS, *by_label}
