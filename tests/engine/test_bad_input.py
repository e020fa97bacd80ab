"""What bad input gets: one clear error for the caller, and nothing for anybody else."""

import pytest

from jaxserve import LLM, ParameterError, QueueFullError, RequestError, SamplingParams
from jaxserve.input_processor import InputProcessor, RequestLimits

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
VOCAB = 320


def goes_on(llm):
    """The engine still serves, and its pool balances."""
    output = llm.generate("The", GREEDY, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 4
    llm.llm_engine.core.scheduler.pool.check()


BAD_PROMPTS = [
    ("", RequestError, "prompt is empty"),
    ([], RequestError, "prompt is empty"),
    ([1] * 128, RequestError, "128 tokens, but max_model_len is 128"),
    (
        [1] * 500,
        RequestError,
        "500 tokens, .* 127 tokens or, where the model was trained for more, raise max_model_len",
    ),
    ([1, 10**6], ParameterError, r"prompt must be token ids in the vocabulary \[0, \d+\), got 1000000"),
    ([1, -1], ParameterError, "prompt must be token ids in the vocabulary"),
    (7, TypeError, "must be a str"),
    ([1.5], TypeError, "a prompt must be a str or a list of token ids"),
    ([True], TypeError, "a prompt must be a str or a list of token ids"),
    ({"prompt": "x"}, TypeError, "must be a str"),
    ("x" * 10_000_000, RequestError, "10000000 characters, more than 127 tokens"),
    (b"bytes", TypeError, "a prompt must be a str"),
    ("lone \ud800 surrogate", RequestError, "must be valid Unicode"),
]


@pytest.mark.parametrize(("prompt", "error", "message"), BAD_PROMPTS, ids=[str(p)[:12] for p, *_ in BAD_PROMPTS])
def test_a_bad_prompt_is_refused_and_its_mates_are_not_run(llm, prompt, error, message):
    batch = prompt if isinstance(prompt, int | dict) else ["The", prompt, "fox"]
    with pytest.raises(error, match=message):
        llm.generate(batch, GREEDY, use_tqdm=False)
    goes_on(llm)


def test_a_bad_request_leaves_running_ones_alone(llm):
    engine = llm.llm_engine
    alone = llm.generate("The quick", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    engine.add_request("good", "The quick", GREEDY)
    engine.step()
    for prompt in ([1] * 500, [], [10**6]):
        with pytest.raises((RequestError, ParameterError)):
            engine.add_request("bad", prompt, GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [o.outputs[0].token_ids for o in outputs if o.finished] == [alone]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "x"}, "priority must be an integer"),
        ({"priority": True}, "priority must be an integer"),
        ({"deadline": float("nan")}, "deadline must be a finite number"),
        ({"deadline": "soon"}, "deadline must be None or a number"),
        ({"cache_salt": 5}, "cache_salt must be None or a str"),
    ],
    ids=str,
)
def test_how_a_request_is_handled_is_checked_too(llm, options, message):
    with pytest.raises(ParameterError, match=message):
        llm.llm_engine.add_request("x", "The", GREEDY, **options)
    llm.llm_engine.add_request("x", "The", GREEDY)  # the id is free
    with pytest.raises(ParameterError, match="request_id must be a str"):
        llm.llm_engine.add_request(7, "The", GREEDY)
    with pytest.raises(TypeError, match="must be a SamplingParams"):
        llm.llm_engine.add_request("y", "The", {"max_tokens": 3})
    goes_on(llm)


def test_a_prompt_one_short_of_the_limit_gets_exactly_one_token(llm):
    output = llm.generate([5] * 127, SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_max_tokens_of_none_runs_to_the_limit(llm):
    output = llm.generate([5] * 100, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (28, "length")


def test_a_duplicate_id_is_refused_and_the_first_is_unharmed(llm):
    engine = llm.llm_engine
    engine.add_request("twice", "The quick", GREEDY)
    with pytest.raises(RequestError, match="request id 'twice' is in use"):
        engine.add_request("twice", "fox", GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [o.prompt for o in outputs if o.finished] == ["The quick"]
    engine.add_request("twice", "fox", GREEDY)  # free again
    engine.abort_request("twice")


def test_a_full_queue_refuses_all_n_samples_of_a_request(make_llm):
    llm = make_llm(max_num_queued_reqs=2)
    engine = llm.llm_engine
    engine.add_request("a", "The", GREEDY)
    with pytest.raises(QueueFullError, match="max_num_queued_reqs is 2"):
        engine.add_request("b", "The", SamplingParams(n=3, max_tokens=2))
    engine.add_request("c", "The", GREEDY)
    with pytest.raises(QueueFullError):
        engine.add_request("d", "The", GREEDY)
    done = set()
    while engine.has_unfinished_requests():
        done |= {o.request_id for o in engine.step() if o.finished}
    assert done == {"a", "c"}
    engine.core.scheduler.pool.check()


def test_a_queue_limit_in_tokens_is_kept(make_llm):
    engine = make_llm(max_num_queued_tokens=20).llm_engine
    engine.add_request("a", [5] * 15, GREEDY)
    with pytest.raises(QueueFullError, match="max_num_queued_tokens is 20"):
        engine.add_request("b", [5] * 15, GREEDY)
    engine.abort_request("a")


OUT_OF_RANGE = [
    ("n", 0), ("n", 1.5), ("n", 20000), ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")),
    ("temperature", "hot"), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1),
    ("min_p", 1.1), ("presence_penalty", -2.1), ("presence_penalty", 2.1), ("frequency_penalty", 2.5),
    ("repetition_penalty", 0.0), ("repetition_penalty", float("inf")), ("seed", 2**63), ("seed", "x"),
    ("max_tokens", 0), ("min_tokens", -1), ("min_tokens", 17), ("stop", [""]), ("stop", [1]),
    ("top_k", 2**31), ("temperature", 10**400), ("repetition_penalty", 1e-320), ("stop", ["x" * 9000]),
    ("stop", 5), ("stop_token_ids", 5), ("bad_words", 5), ("allowed_token_ids", 5), ("logit_bias", "abc"),
    ("logit_bias", {1.7: 1.0}), ("ignore_eos", "false"), ("detokenize", 3), ("extra_args", [1]),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("logprobs", -2), ("prompt_logprobs", 1.0),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {"a": 1.0}), ("logit_bias", [3]), ("logit_bias", {1: None}),
    ("logit_bias", {1: float("nan")}), ("allowed_token_ids", []),
    ("allowed_token_ids", [-3]), ("bad_words", [""]), ("bad_words", "word"), ("output_kind", "delta"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_sampling_parameter_out_of_range_names_field_and_value(name, value):
    with pytest.raises(ParameterError, match=f"^{name} must be") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


FOR_THIS_MODEL = [
    ("stop_token_ids", {"stop_token_ids": [10**6]}, "in the vocabulary"),
    ("allowed_token_ids", {"allowed_token_ids": [10**6]}, "in the vocabulary"),
    ("logit_bias", {"logit_bias": {10**6: 1.0}}, "in the vocabulary"),
    ("logprobs", {"logprobs": 21}, "at most max_logprobs"),
    ("logprobs", {"logprobs": -1}, "at most max_logprobs"),
    ("prompt_logprobs", {"prompt_logprobs": 21}, "at most max_logprobs"),
    ("allowed_token_ids", {"allowed_token_ids": [2], "min_tokens": 1}, "more than stop ids"),
    ("stop_token_ids", {"stop_token_ids": list(range(100))}, "at most 63 ids"),
    ("bad_words", {"bad_words": [f"w{i}" for i in range(40)]}, "at most 16 words"),
    ("bad_words", {"bad_words": ["zqzqzqzqzqzqzqzqzqzq"]}, "words of at most 8 tokens"),
    ("bad_words", {"bad_words": ["z" * 10_000_000]}, "words of at most 8 tokens"),
]


@pytest.mark.parametrize(
    ("name", "options", "message"), FOR_THIS_MODEL, ids=[str(o)[:30] for _, o, _ in FOR_THIS_MODEL]
)
def test_a_parameter_that_this_model_cannot_serve_is_refused(llm, name, options, message):
    with pytest.raises(ParameterError, match=message) as caught:
        llm.generate("The", SamplingParams(**options), use_tqdm=False)
    assert caught.value.parameter == name
    goes_on(llm)


def test_a_lone_surrogate_in_bad_words_is_refused(llm):
    with pytest.raises(RequestError, match="lone surrogate"):
        llm.generate("The", SamplingParams(bad_words=["\ud800"]), use_tqdm=False)
    goes_on(llm)


@pytest.mark.parametrize("eos", [10**12, -1, "x", [[1]], 1.5, True, list(range(100))], ids=str)
def test_junk_in_generation_config_is_refused_at_start(llm, eos):
    with pytest.raises(ValueError, match="generation_config's eos_token_id must be"):
        InputProcessor(None, llm.llm_engine.core.limits(), {"eos_token_id": eos})
    with pytest.raises(ValueError, match="generation_config: temperature must be"):
        InputProcessor(None, llm.llm_engine.core.limits(), {"temperature": "hot"})


def test_more_logprobs_than_the_vocabulary_holds_give_the_whole_vocabulary(make_llm):
    output = make_llm(max_logprobs=1000).generate(
        "The", SamplingParams(temperature=0.0, max_tokens=1, logprobs=500), use_tqdm=False
    )
    assert len(output[0].outputs[0].logprobs[0]) == VOCAB


def test_greedy_sampling_with_n_is_refused():
    with pytest.raises(ParameterError, match="n must be 1 when temperature is 0"):
        SamplingParams(n=2, temperature=0.0)


def test_stop_strings_need_detokenisation():
    with pytest.raises(ParameterError, match="stop must be empty when detokenize is False"):
        SamplingParams(stop="x", detokenize=False)


def test_unknown_keywords_are_errors_everywhere(llm, tiny_model):
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)
    with pytest.raises(ParameterError, match="top_q must be left out"):
        SamplingParams.of(top_q=1)
    with pytest.raises(NotImplementedError, match="flat_logprobs is not supported yet"):
        SamplingParams(flat_logprobs=True)
    with pytest.raises(NotImplementedError, match="flat_logprobs is not supported yet"):
        SamplingParams.of(flat_logprobs=True)
    with pytest.raises(TypeError, match=r"unknown engine options \['block_size'\]; known: .*page_size"):
        LLM(tiny_model, block_size=16)
    with pytest.raises(TypeError, match="use_tqmd"):
        llm.generate("The", GREEDY, use_tqmd=False)
    with pytest.raises(TypeError, match="prio"):
        llm.llm_engine.add_request("x", "The", GREEDY, prio=1)


BAD_OPTIONS = [
    ({"page_size": 12}, "page_size must be a power of two, got 12"),
    ({"dtype": "int4"}, "dtype must be one of"),
    ({"kv_cache_dtype": "fp8_e5m2"}, r"kv_cache_dtype must be one of \('auto', 'fp8'\), got 'fp8_e5m2'"),
    ({"num_pages": 1}, "num_pages must be None or an integer >= 2"),
    ({"num_pages": 10**12}, "num_pages must be None or at most"),
    ({"max_num_seqs": 10**8}, "max_num_seqs must be None or at most"),
    ({"num_pages": 8, "max_model_len": 128}, "holds 56 tokens .* lower max_model_len to 56"),
    ({"max_model_len": 4096}, "beyond the model's max_position_embeddings 512"),
    ({"device_memory_utilization": 1.5}, r"device_memory_utilization must be in \(0, 1\]"),
    ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of"),
    ({"prefill": "lazy"}, "prefill must be one of"),
    ({"prefill_order": "longest"}, "prefill_order must be one of"),
    ({"prefill": "layered", "target_tbt_ms": 0}, "target_tbt_ms must be None or a number of milliseconds above 0"),
    ({"target_tbt_ms": 20.0}, "are for prefill 'layered' or 'auto'"),
    ({"prefill_order": "slack"}, "are for prefill 'layered' or 'auto'"),
    ({"prefill": "auto", "enable_chunked_prefill": False, "max_num_batched_tokens": 128}, "must be True, got False"),
    ({"watermark": 1.0}, r"watermark must be in \[0, 1\)"),
    ({"quantization": "int3"}, "quantization must be one of"),
    ({"kv_cache_memory_bytes": 10, "num_pages": None}, "no room for a KV pool"),
    ({"warm_up": "later"}, "warm_up must be one of"),
    ({"max_num_seqs": 65}, "max_num_seqs"),
    ({"max_num_seqs": 0}, "max_num_seqs must be None or an integer >= 1"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be None or an integer >= 1"),
    ({"max_logprobs": None}, "max_logprobs must be an integer >= -1, got None"),
    ({"async_scheduling": "no"}, "async_scheduling must be True or False"),
    ({"enable_prefix_caching": 0}, "enable_prefix_caching must be True or False"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[str(o) for o, _ in BAD_OPTIONS])
def test_engine_options_that_cannot_work_are_refused_at_start(make_llm, options, message):
    with pytest.raises(ValueError, match=message):
        make_llm(**options)


def test_mismatched_lists_are_refused(llm):
    with pytest.raises(ValueError, match=r"one a prompt \(2\), got 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match=r"one number a prompt \(2\), got 3"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 2, 3])


def test_every_request_ends_exactly_once(make_llm):
    llm = make_llm(num_pages=20)
    engine = llm.llm_engine
    ends = {}
    for i in range(30):
        engine.add_request(str(i), [i + 3] * (i + 1), SamplingParams(max_tokens=i % 7 + 1, ignore_eos=True))
        if i % 5 == 4:
            for output in [*engine.step(), *engine.abort_request(str(i - 1))]:
                if output.finished:
                    ends[output.request_id] = ends.get(output.request_id, 0) + 1
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ends[output.request_id] = ends.get(output.request_id, 0) + 1
    assert ends == {str(i): 1 for i in range(30)}
    engine.core.scheduler.pool.check()
    assert engine.core.scheduler.pool.num_held == 0


def test_samples_share_what_a_request_lists():
    limits = RequestLimits(vocab_size=1000, max_model_len=64, max_logprobs=5)
    params = SamplingParams(n=3, seed=5, allowed_token_ids=list(range(1000)))
    cores = InputProcessor(None, limits, {}).process([1, 2], params, now=0.0)
    assert [core.params.seed for core in cores] == [5, 6, 7]
    assert all(core.params.allowed_token_ids is params.allowed_token_ids for core in cores)
    assert (params.n, params.seed) == (3, 5)
    with pytest.raises(ParameterError, match="allowed_token_ids must be at most"):
        SamplingParams(allowed_token_ids=range((1 << 20) + 1))
