"""AsyncLLM over the real engine: the same tokens as in process, real refusals, real aborts."""

import asyncio

import pytest

from jaxserve import AsyncLLM, EngineDeadError, QueueFullError, RequestError, SamplingParams
from jaxserve.sampling_params import RequestOutputKind

OPTIONS = {"dtype": "float32", "max_model_len": 128, "page_size": 8, "max_num_batched_tokens": 64, "warm_up": "off"}
PROMPTS = ["The quick brown", "Pack my box", [5, 6, 7, 8], "Paged attention keeps keys"]


@pytest.fixture(scope="module")
def async_llm(tiny_model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        llm = AsyncLLM(tiny_model, **OPTIONS, num_pages=100, max_num_seqs=4, max_num_queued_reqs=6)
    yield llm
    llm.shutdown()


async def last(llm, prompt, params, request_id, **options):
    return [output async for output in llm.generate(prompt, params, request_id, **options)][-1]


async def idle(llm):
    for _ in range(500):
        metrics = await llm.get_metrics()
        if metrics["jaxserve:num_requests_running"] == metrics["jaxserve:num_requests_waiting"] == 0:
            return metrics
        await asyncio.sleep(0.02)
    raise AssertionError(f"requests are left: {metrics}")


def test_it_gives_the_tokens_and_text_of_the_engine_in_process(async_llm, llm):
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=40, stop=["e", "a"]),
    ]

    async def main():
        pairs = enumerate(zip(PROMPTS, params, strict=True))
        return await asyncio.gather(*(last(async_llm, prompt, p, str(i)) for i, (prompt, p) in pairs))

    for here, there in zip(llm.generate(PROMPTS, params, use_tqdm=False), asyncio.run(main()), strict=True):
        assert there.prompt_token_ids == here.prompt_token_ids
        assert [sample.token_ids for sample in there.outputs] == [sample.token_ids for sample in here.outputs]
        assert [sample.text for sample in there.outputs] == [sample.text for sample in here.outputs]
        for name in ("finish_reason", "stop_reason"):
            assert [getattr(s, name) for s in there.outputs] == [getattr(s, name) for s in here.outputs]
        assert (there.outputs[0].logprobs is None) == (here.outputs[0].logprobs is None)
        assert (there.prompt_logprobs is None) == (here.prompt_logprobs is None)
        assert there.metrics.arrival_time <= there.metrics.first_scheduled_time <= there.metrics.first_token_time


def test_no_sampling_params_means_generation_config(async_llm):
    output = asyncio.run(last(async_llm, "The", None, "r"))
    assert len(output.outputs[0].token_ids) <= 5  # max_new_tokens of the tiny model


def test_a_full_queue_refuses_and_serves_the_rest(async_llm):
    async def main():
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        calls = (last(async_llm, "The quick", params, str(i)) for i in range(30))
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [r for r in results if isinstance(r, QueueFullError)]
        served = [r for r in results if not isinstance(r, BaseException)]
        assert len(refused) > 0
        assert len(served) > 0
        assert len(refused) + len(served) == 30
        assert len({tuple(r.outputs[0].token_ids) for r in served}) == 1
        await idle(async_llm)

    asyncio.run(main())


def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(async_llm):
    with pytest.raises(RequestError, match="200 tokens, but max_model_len is 128"):
        asyncio.run(last(async_llm, [5] * 200, SamplingParams(), "r"))


def test_closed_streams_and_deadlines_leave_nothing_in_the_engine(async_llm):
    async def main():
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        streams = [async_llm.generate("The quick brown", params, str(i)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        for stream in streams:
            await stream.aclose()
        late = await last(async_llm, "The quick brown", params, "late", deadline=0.0)
        assert late.outputs[0].finish_reason == "abort"
        metrics = await idle(async_llm)
        assert metrics["jaxserve:kv_cache_usage_perc"] == 0
        assert await async_llm.reset_prefix_cache()

    asyncio.run(main())


def test_a_pool_too_small_for_one_request_is_told_with_the_length_that_fits(tiny_model, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(EngineDeadError, match="lower max_model_len to 64"):
        AsyncLLM(tiny_model, **OPTIONS, num_pages=9)
