"""`LLM` and `LLMEngine` as callers see them."""

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import signal

import jax
import numpy as np
import pytest

from jaxserve import EngineDeadError, RequestOutputKind, SamplingParams
from jaxserve.core_types import CoreOutput
from jaxserve.step_future import StepFuture

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

GREEDY_30 = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def tokens(output, index=0):
    return output.outputs[index].token_ids


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = ["The quick", [5, 6, 7], "Pack my box with five dozen", [9]]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 3, 1, 6)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(tokens(o)) for o in outputs] == [9, 3, 1, 6]
    assert [o.prompt for o in outputs] == ["The quick", None, "Pack my box with five dozen", None]
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_progress_is_for_terminals_only(llm, capsys, monkeypatch):
    llm.generate("The quick", GREEDY)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    llm.generate("The quick", GREEDY)
    assert "1/1" in capsys.readouterr().err


def test_one_prompt_may_be_text_or_token_ids(llm):
    text = llm.generate("The quick", GREEDY, use_tqdm=False)
    ids = llm.generate(llm.get_tokenizer().encode("The quick"), GREEDY, use_tqdm=False)
    assert len(text) == len(ids) == 1
    assert tokens(text[0]) == tokens(ids[0])
    assert llm.get_tokenizer().decode(tokens(text[0])) == text[0].outputs[0].text


def test_an_empty_batch_gives_an_empty_list(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_defaults_come_from_generation_config(llm):
    assert llm.get_default_sampling_params() == SamplingParams(top_k=7, max_tokens=5)
    assert len(tokens(llm.generate("The", use_tqdm=False)[0])) <= 5


def test_chat_renders_the_template_and_continues_it(llm):
    conversation = [{"role": "user", "content": "jugs"}]
    tokenizer = llm.get_tokenizer()
    rendered = "<|im_start|>user\njugs<|im_end|>\n<|im_start|>assistant\n"
    chat = llm.chat(conversation, GREEDY, use_tqdm=False)
    plain = llm.generate(tokenizer.encode(rendered, add_special_tokens=False), GREEDY, use_tqdm=False)
    assert chat[0].prompt == rendered
    assert chat[0].prompt_token_ids == plain[0].prompt_token_ids
    assert tokens(chat[0]) == tokens(plain[0])
    assert len(llm.chat([conversation, conversation], GREEDY, use_tqdm=False)) == 2


def test_the_seeded_sample_i_of_n_equals_a_lone_run_with_seed_plus_i(make_llm):
    llm = make_llm()
    params = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True}
    many = llm.generate("The quick brown fox", SamplingParams(n=4, seed=40, **params), use_tqdm=False)[0]
    assert [o.index for o in many.outputs] == [0, 1, 2, 3]
    for i in range(4):
        alone = llm.generate("The quick brown fox", SamplingParams(seed=40 + i, **params), use_tqdm=False)[0]
        assert tokens(alone) == tokens(many, i)
    assert len({tuple(o.token_ids) for o in many.outputs}) == 4


def test_unseeded_samples_differ_from_each_other(llm):
    params = SamplingParams(n=3, temperature=2.0, max_tokens=8, ignore_eos=True)
    output = llm.generate("The", params, use_tqdm=False)[0]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3


def test_samples_share_the_prompts_pages(make_llm):
    llm = make_llm()
    prompt = list(range(10, 50))
    llm.generate(prompt, SamplingParams(n=3, seed=1, max_tokens=2, ignore_eos=True), use_tqdm=False)
    metrics = llm.get_metrics()
    assert metrics["jaxserve:prefix_cache_hits"] == 2 * 32  # 39 of 40 tokens may hit: four full pages of 8


def test_eos_ends_a_sequence_and_is_no_text(make_llm):
    llm = make_llm()
    free = llm.generate("Pack my box", GREEDY, use_tqdm=False)[0]
    eos = tokens(free)[4]
    first = tokens(free).index(eos)
    stopped = llm.generate(
        "Pack my box", SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[eos]), use_tqdm=False
    )[0].outputs[0]
    assert stopped.token_ids == tokens(free)[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", eos)
    assert stopped.text == llm.get_tokenizer().decode(tokens(free)[:first])


def test_min_tokens_holds_back_stop_ids(llm):
    free = tokens(llm.generate("Pack my box", GREEDY, use_tqdm=False)[0])
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=6, stop_token_ids=free[:3], ignore_eos=True)
    held = tokens(llm.generate("Pack my box", params, use_tqdm=False)[0])
    assert len(held) >= 6
    assert not set(held[:5]) & set(free[:3])


def stream(llm, params, prompt="The quick brown", request_id="s"):
    engine = llm.llm_engine
    engine.add_request(request_id, prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_deltas_add_up_to_the_whole(llm):
    whole = llm.generate("The quick brown", GREEDY, use_tqdm=False)[0].outputs[0]
    delta = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA, logprobs=1
    )
    parts = [o.outputs[0] for o in stream(llm, delta)]
    assert len(parts) > 5
    assert "".join(p.text for p in parts) == whole.text
    assert [t for p in parts for t in p.token_ids] == whole.token_ids
    assert sum(len(p.logprobs) for p in parts) == 12
    assert parts[-1].finish_reason == "length"
    assert all(p.finish_reason is None for p in parts[:-1])


def test_cumulative_outputs_grow(llm):
    parts = [
        (o.outputs[0].text, len(o.outputs[0].token_ids), o.finished)
        for o in stream_snapshots(llm, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    ]
    assert [n for _, n, _ in parts] == list(range(1, 13))
    assert all(later.startswith(text) for (text, *_), (later, *_) in itertools.pairwise(parts))
    assert [done for *_, done in parts] == [False] * 11 + [True]


def stream_snapshots(llm, params):
    """Outputs as they were when they came: cumulative ones share their token list."""
    engine = llm.llm_engine
    engine.add_request("c", "The quick brown", params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first = output.outputs[0]
            first.token_ids = list(first.token_ids)
            yield output


def test_final_only_gives_one_output(llm):
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    outputs = stream(llm, params)
    assert len(outputs) == 1
    assert outputs[0].finished


def test_a_stop_string_cuts_the_text_and_frees_the_request(llm):
    whole = llm.generate("The quick brown", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = whole[5:8]
    at = whole.index(stop)
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    output = llm.generate("The quick brown", SamplingParams(stop=stop, **params), use_tqdm=False)[0].outputs[0]
    assert output.text == whole[:at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    kept = SamplingParams(stop=[stop], include_stop_str_in_output=True, **params)
    assert llm.generate("The quick brown", kept, use_tqdm=False)[0].outputs[0].text == whole[: at + len(stop)]


def test_no_part_of_a_stop_string_is_streamed(llm):
    whole = llm.generate("The quick brown", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = whole[4:9]
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop, output_kind=RequestOutputKind.DELTA
    )
    seen = ""
    for output in stream(llm, params):
        seen += output.outputs[0].text
        assert seen == whole[: whole.index(stop)][: len(seen)]
    assert seen == whole[: whole.index(stop)]


def test_logprobs_hold_the_sampled_token_first_and_k_others(llm):
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=6, ignore_eos=True, logprobs=3)
    output = llm.generate("The", params, use_tqdm=False)[0].outputs[0]
    assert len(output.logprobs) == 6
    for token, candidates in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(candidates)) == token
        assert 3 <= len(candidates) <= 4
        best = max(candidates.values(), key=lambda c: c.logprob)
        assert best.rank == 1
        assert candidates[token].decoded_token is not None
    total = sum(c[t].logprob for t, c in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_zero_logprobs_gives_the_sampled_token_only(llm):
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=0)
    assert [len(c) for c in llm.generate("The", params, use_tqdm=False)[0].outputs[0].logprobs] == [1, 1]


@pytest.mark.parametrize("options", [{}, {"long_prefill_token_threshold": 16}, {"num_pages": 12}])
def test_prompt_logprobs_are_complete_whatever_the_chunking(make_llm, options):
    llm = make_llm(max_logprobs=5, max_model_len=80, **options)
    prompt = np.random.default_rng(1).integers(3, 300, 41).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)  # fills the prefix cache
    cold, warm = llm.generate([prompt, prompt], params, use_tqdm=False)
    for output in (cold, warm):
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == 41
        for token, candidates in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert next(iter(candidates)) == token
    reference = [next(iter(c.values())).logprob for c in cold.prompt_logprobs[1:]]
    again = [next(iter(c.values())).logprob for c in warm.prompt_logprobs[1:]]
    np.testing.assert_allclose(reference, again, atol=1e-4)
    # position j's candidates are what greedy decoding sees after j tokens
    step = llm.generate(prompt[:20], SamplingParams(temperature=0.0, max_tokens=1, logprobs=2), use_tqdm=False)[0]
    best = [t for t, c in cold.prompt_logprobs[20].items() if c.rank == 1]
    assert best == step.outputs[0].token_ids


def test_all_logprobs_need_an_engine_that_allows_them(make_llm):
    llm = make_llm(max_logprobs=-1)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    candidates = llm.generate("The", params, use_tqdm=False)[0].outputs[0].logprobs[0]
    assert len(candidates) == llm.llm_engine.core.limits().vocab_size
    assert sum(np.exp(c.logprob) for c in candidates.values()) == pytest.approx(1.0, abs=1e-4)


def test_logit_bias_allowed_tokens_and_bad_words_steer_the_text(llm):
    tokenizer = llm.get_tokenizer()
    params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    run = lambda **extra: tokens(llm.generate("The", SamplingParams(**params, **extra), use_tqdm=False)[0])  # noqa: E731
    free = run()
    assert run(logit_bias={77: 100}) == [77] * 6
    assert set(run(allowed_token_ids=[50, 60])) <= {50, 60}
    banned = tokenizer.decode(free[:1])
    assert free[0] not in run(bad_words=[banned])
    assert run(frequency_penalty=2.0, logit_bias={77: 100})[:6] == [77] * 6  # 2 a time is little beside 100
    assert len(set(run(repetition_penalty=100.0))) == 6


def test_a_slot_forgets_the_edits_of_its_last_owner(make_llm):
    llm = make_llm()
    free = tokens(llm.generate("The", GREEDY, use_tqdm=False)[0])
    edits = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={77: 100}, bad_words=["The"])
    llm.generate(["The"] * 8, edits, use_tqdm=False)  # every slot
    mild = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, frequency_penalty=0.1)
    beside = llm.generate(["The", "fox"], [GREEDY, mild], use_tqdm=False)[0]
    assert tokens(beside) == free
    warm = make_llm(warm_up="blocking", max_num_seqs=2, max_num_batched_tokens=16)
    warm.generate(["The"] * 2, edits, use_tqdm=False)
    probed = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    assert tokens(warm.generate("The", probed, use_tqdm=False)[0]) == free


def test_an_interrupted_step_is_read_again(make_llm, monkeypatch):
    llm = make_llm()
    whole = tokens(llm.generate("The", GREEDY, use_tqdm=False)[0])
    engine, result, calls = llm.llm_engine, StepFuture.result, []

    def interrupted(self):
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return result(self)

    monkeypatch.setattr(StepFuture, "result", interrupted)
    engine.add_request("a", "The", GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        with contextlib.suppress(KeyboardInterrupt):
            outputs += engine.step()
    assert tokens(outputs[-1]) == whole
    engine.core.scheduler.pool.check()
    assert engine.core.scheduler.pool.num_held == 0


def test_ctrl_c_in_generate_leaves_nothing_behind(make_llm, monkeypatch):
    llm = make_llm()
    whole = tokens(llm.generate("The", GREEDY, use_tqdm=False)[0])
    step = type(llm.llm_engine).step
    calls = []

    def interrupted(self):
        calls.append(self)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(type(llm.llm_engine), "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["The", "fox"], GREEDY, use_tqdm=False)
    assert llm.llm_engine.core.scheduler.pool.num_held == 0
    assert tokens(llm.generate("The", GREEDY, use_tqdm=False)[0]) == whole


def test_an_interrupt_waits_for_the_end_of_the_step(make_llm, monkeypatch):
    llm = make_llm()
    dispatch, calls = type(llm.llm_engine.core.runner).dispatch, []

    def interrupted(self, plan):
        calls.append(plan)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)  # would cut the step between donation and assignment
        return dispatch(self, plan)

    monkeypatch.setattr(type(llm.llm_engine.core.runner), "dispatch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("The", GREEDY, use_tqdm=False)
    assert len(calls) == 3
    assert len(tokens(llm.generate("The", GREEDY, use_tqdm=False)[0])) == 12
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_threads_take_turns(llm):
    alone = tokens(llm.generate("The", GREEDY, use_tqdm=False)[0])
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(llm.generate, "The", GREEDY, use_tqdm=False) for _ in range(8)]
        assert [tokens(job.result()[0]) for job in jobs] == [alone] * 8


def test_a_failed_step_ends_the_engine_and_says_why(make_llm, monkeypatch):
    llm = make_llm()
    monkeypatch.setattr(type(llm.llm_engine.core.runner), "dispatch", lambda self, plan: 1 / 0)
    with pytest.raises(EngineDeadError, match="a step failed: ZeroDivisionError"):
        llm.generate("The", GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="a step failed"):
        llm.llm_engine.add_request("b", "The", GREEDY)


def test_logprobs_and_prompt_logprobs_survive_preemption(make_llm):
    prompts = [[i] * 20 for i in range(10, 16)]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    roomy = make_llm().generate(prompts, params, use_tqdm=False)
    tight = make_llm(num_pages=20, scheduler_reserve_full_isl=False)
    outputs = tight.generate(prompts, params, use_tqdm=False)
    assert tight.get_metrics()["jaxserve:num_preemptions"] > 0
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    for output, expected in zip(outputs, roomy, strict=True):
        assert tokens(output) == tokens(expected)
        for ours, theirs in zip(output.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
            assert next(iter(ours.values())).logprob == pytest.approx(next(iter(theirs.values())).logprob, abs=1e-4)
        for ours, theirs in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert next(iter(ours.values())).logprob == pytest.approx(next(iter(theirs.values())).logprob, abs=1e-4)


def test_preemptions_are_reported_when_a_stop_string_ends_a_request(make_llm):
    prompts = [[i] * 20 for i in range(10, 16)]
    free = make_llm().generate(prompts, GREEDY_30, use_tqdm=False)
    tight = make_llm(num_pages=20)
    stops = [o.outputs[0].text[-3:] for o in free]
    params = [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=[s], min_tokens=29) for s in stops]
    outputs = tight.generate(prompts, params, use_tqdm=False)
    preempted = tight.get_metrics()["jaxserve:num_preemptions"]
    assert preempted > 0
    assert sum(o.metrics.num_preemptions for o in outputs) == preempted


def test_presence_penalty_survives_preemption_and_batching(make_llm):
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, presence_penalty=1.5, min_tokens=3)
    prompts = [[i, i + 1, i + 2] for i in range(10, 18)]
    roomy = [tokens(o) for o in make_llm().generate(prompts, params, use_tqdm=False)]
    tight = make_llm(num_pages=18)
    assert [tokens(o) for o in tight.generate(prompts, params, use_tqdm=False)] == roomy
    assert tight.get_metrics()["jaxserve:num_preemptions"] > 0


def test_abort_returns_what_there_is_and_unknown_ids_are_no_ops(llm):
    engine = llm.llm_engine
    engine.add_request("a", "The quick", SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert engine.abort_request("nobody") == []
    (output,) = engine.abort_request(["a"])
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(tokens(output)) < 50


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_leaves_nothing_behind_in_any_state(llm, steps):
    engine = llm.llm_engine
    for i in range(3):
        engine.add_request(f"a{i}", list(range(10, 90)), SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    engine.abort_request([f"a{i}" for i in range(3)])
    assert engine.get_num_unfinished_requests() == 0


def test_a_deadline_ends_a_request_with_abort(llm):
    engine = llm.llm_engine
    engine.add_request("d", "The", SamplingParams(max_tokens=100, ignore_eos=True), deadline=0.0)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [(o.finished, o.outputs[0].finish_reason) for o in outputs] == [(True, "abort")]


def test_generate_works_inside_a_running_event_loop(llm):
    async def inside():
        return llm.generate("The", GREEDY, use_tqdm=False)

    assert len(tokens(asyncio.run(inside())[0])) == 12


def test_a_prefix_is_computed_once_and_reset_forgets_it(make_llm):
    llm = make_llm()
    prompt = list(range(10, 60))
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert tokens(first) == tokens(second)
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_wholly_cached_prompt_still_computes_its_last_token(make_llm):
    llm = make_llm()
    prompt = list(range(10, 58))  # six full pages
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens == 40
    assert tokens(first) == tokens(second)


def test_cache_salts_keep_prefixes_apart(llm):
    engine = llm.llm_engine
    llm.reset_prefix_cache()
    cached = {}
    for name, salt in [("a", "x"), ("b", "y"), ("c", "x")]:
        engine.add_request(name, list(range(100, 150)), GREEDY, cache_salt=salt)
        while engine.has_unfinished_requests():
            for output in engine.step():
                cached[name] = output.num_cached_tokens
    assert cached == {"a": 0, "b": 0, "c": 48}


def test_lower_priority_numbers_go_first(make_llm):
    engine = make_llm(scheduling_policy="priority", max_num_seqs=1).llm_engine
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for name, priority in [("late", 5), ("soon", 1), ("first", 0)]:
        engine.add_request(name, "The", short, priority=priority)
    order = []
    while engine.has_unfinished_requests():
        order += [o.request_id for o in engine.step() if o.finished]
    assert order == ["first", "soon", "late"]


def test_metrics_count_tokens_and_ends(make_llm):
    llm = make_llm()
    llm.generate([[5, 6, 7], [8, 9]], GREEDY, use_tqdm=False)
    metrics = llm.get_metrics()
    assert metrics["jaxserve:prompt_tokens"] == 5
    assert metrics["jaxserve:generation_tokens"] == 24
    assert metrics['jaxserve:request_success{finished_reason="length"}'] == 2
    assert metrics["jaxserve:num_requests_running"] == metrics["jaxserve:num_requests_waiting"] == 0
    assert metrics["jaxserve:start_load_seconds"] > 0


def test_request_metrics_are_in_order(llm):
    m = llm.generate("The", GREEDY, use_tqdm=False)[0].metrics
    times = [m.arrival_time, m.first_scheduled_time, m.first_token_time, m.last_token_time, m.finished_time]
    assert times == sorted(times)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"prefill": "layered", "target_tbt_ms": 1e-3}, marks=pytest.mark.full)]
)
def test_nothing_compiles_in_a_step_after_warm_up(make_llm, options):
    llm = make_llm(warm_up="blocking", max_num_batched_tokens=32, **options)
    assert llm.get_metrics()["jaxserve:num_stalls"] == 0
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2, presence_penalty=0.1)
    llm.generate([[5] * n for n in (1, 30, 60, 7)], [GREEDY, params, GREEDY, params], use_tqdm=False)
    assert llm.get_metrics()["jaxserve:num_stalls"] == 0
    assert llm.get_metrics()["jaxserve:compile_seconds"] > 0


def test_an_update_for_a_sequence_that_ended_here_is_dropped(llm):
    processor = llm.llm_engine._outputs
    assert processor.process([CoreOutput(seq_id=10**9, new_token_ids=[1])], 0.0) == ([], [])


def test_a_closed_engine_gives_its_memory_back(make_llm):
    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    before = live()
    llm = make_llm(num_pages=512)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    kv = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.llm_engine.core.runner.device.kv))
    assert live() - before > kv
    llm.close()
    assert live() - before < kv / 8


def test_a_closed_engine_lets_go_of_its_programs(make_llm):
    """On CPU they are memory maps, of which Linux gives a process 65,530."""

    def live() -> int:
        names = (program.hlo_modules()[0].name for program in jax.devices()[0].client.live_executables())
        return sum(name == "jit_forward_step" for name in names)

    llm = make_llm(page_size=4)  # shapes that no other engine here has
    before = live()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert live() > before
    llm.close()
    gc.collect()
    assert live() <= before
