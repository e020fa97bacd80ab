"""Streams, refusals, cancellation and deadlines of the gRPC example, with real clients against its real server."""

import asyncio
import time

import grpc
import pytest
from grpc_harness import Code, messages, pb, refusal, request, rpc, service, serving, text_of

from jaxserve import RequestOutput, SamplingParams
from jaxserve.outputs import CompletionOutput

LONG = 4000


@pytest.fixture(scope="module")
def it():
    with serving(step_s=0.001) as running:
        yield running


def test_deltas_and_a_completion_for_each_sample(it):
    async def main():
        async with grpc.aio.insecure_channel(it.address) as channel:
            call = rpc.GenerationStub(channel).Generate(request(request_id="r", n=2, max_tokens=7, temperature=1.0))
            return [response async for response in call]

    responses = it.run(main())
    assert {r.request_id for r in responses} == {"r"}
    for index in range(2):
        mine = [e for r in responses if (e := getattr(r, r.WhichOneof("event"))).index == index]
        *deltas, completion = mine
        assert "".join(delta.text for delta in deltas) == "abcabca"
        assert bytes(token for delta in deltas for token in delta.token_ids) == b"abcabca"
        assert (completion.finish_reason, completion.num_completion_tokens) == ("length", 7)
        assert (completion.num_prompt_tokens, completion.num_cached_tokens) == (3, 2)
        assert completion.WhichOneof("stop_reason") is None
        assert not completion.HasField("cumulative_logprob")


def test_token_ids_for_a_prompt_and_an_id_from_the_server(it):
    *_, last = responses = list(it.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[104, 105]))))
    assert text_of(responses) == "hi" * 8  # max_tokens has its default, 16
    assert last.request_id


def test_without_streaming_one_delta_holds_all(it):
    first, second = it.stub.Generate(request(max_tokens=9, stream=False))
    assert (first.delta.text, bytes(first.delta.token_ids)) == ("abc" * 3, b"abc" * 3)
    assert (second.completion.finish_reason, second.completion.num_completion_tokens) == ("length", 9)


def test_priority_salt_and_deadline_reach_the_engine(it):
    message = pb.GenerateRequest(text="abc", priority=-5, cache_salt="17")
    assert text_of(it.stub.Generate(message, timeout=50)) == ("abc" * 6)[:16]
    metrics = it.info().metrics
    assert (metrics["priority"], metrics["salt"]) == (-5, 17)
    assert 40 < metrics["left_s"] < 51
    assert text_of(it.stub.Generate(pb.GenerateRequest(text="abc")))
    metrics = it.info().metrics
    assert metrics["priority"] == 0
    assert metrics["left_s"] < 0
    assert metrics["salt"] != metrics["salt"]  # none


def test_a_stop_string_is_named_in_the_completion(it):
    responses = list(it.stub.Generate(request("abcdef", stop=["de"], max_tokens=100)))
    completion = responses[-1].completion
    assert (text_of(responses), completion.finish_reason, completion.stop_string) == ("abc", "stop", "de")
    it.settled(running=0)


def test_logprobs_come_with_their_tokens_and_the_prompts_before_them(it):
    asked = request("abcd" * 100, max_tokens=3, logprobs=1, prompt_logprobs=1)
    responses = list(it.stub.Generate(asked))
    prompt = [r.prompt_logprobs for r in responses if r.HasField("prompt_logprobs")]
    assert [part.start for part in prompt] == [0, messages.PROMPT_LOGPROBS_A_MESSAGE]
    assert sum(len(part.positions) for part in prompt) == 400
    assert not prompt[0].positions[0].token_ids
    assert list(prompt[0].positions[1].tokens) == ["b", "c"]
    deltas = [r.delta for r in responses if r.HasField("delta")]
    first = deltas[0].logprobs[0]
    assert list(first.token_ids) == [97, 98]
    assert list(first.tokens) == ["a", "b"]
    assert list(first.logprobs) == [-0.5, -1.5]
    assert list(first.ranks) == [1, 1]
    assert sum(len(delta.logprobs) for delta in deltas) == 3
    assert responses[-1].completion.cumulative_logprob == pytest.approx(-1.5)


def test_a_slow_reader_gets_fewer_longer_deltas(it):
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    with grpc.insecure_channel(it.address, small_window) as channel:
        call = rpc.GenerationStub(channel).Generate(request(max_tokens=1000, request_id="x" * 256))
        first = next(call)
        while it.info().metrics["running"]:
            time.sleep(0.02)
        responses = [first, *call]
    assert text_of(responses) == ("abc" * 1000)[:1000]
    assert len(responses) < 800


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (request(temperature=9.0), "temperature must be in [0, 2], got 9.0"),
        (request(top_p=float("nan")), "top_p"),
        (request(n=129), "n must be an integer in [1, 128], got 129"),
        (request(max_tokens=0), "max_tokens"),
        (request(stop=[""]), "stop"),
        (request(logit_bias={200: 1.0}), "logit_bias"),
        (request(bad_words=list(map(str, range(100)))), "bad_words"),
        (request(logprobs=99), "logprobs"),
        (request(prompt_logprobs=-2), "prompt_logprobs"),
        (request(structured_outputs=pb.StructuredOutputs()), "structured_outputs must hold"),
        (request(structured_outputs=pb.StructuredOutputs(json_object=False)), "json_object must be true, got false"),
        (request(""), "prompt is empty"),
        (request("x" * 5000), "prompt has 5000 characters"),
        (request(request_id="x" * 257), "request_id must be at most 256 characters"),
        (pb.GenerateRequest(), "prompt must be set"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])), "prompt must be token ids"),
    ],
)
def test_a_bad_field_is_named(it, message, named):
    code, details = refusal(it.stub.Generate(message))
    assert (code, named in details) == (Code.INVALID_ARGUMENT, True), details


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ({"json_schema": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": pb.Choice(choices=["yes", "no"])}, {"choice": ["yes", "no"]}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"json_object": True}, {"json_object": True}),
    ],
)
def test_constraints_have_the_librarys_names(message, options):
    assert messages.form_of(pb.StructuredOutputs(**message)) == options


def test_a_full_queue_and_a_refusing_engine_have_their_codes(it):
    assert refusal(it.stub.Generate(request("full")))[0] is Code.RESOURCE_EXHAUSTED
    assert refusal(it.stub.Generate(request("refuse"))) == (Code.INVALID_ARGUMENT, "refused, as planted")


def test_an_id_in_use_is_refused_and_free_again_later(it):
    first = it.stub.Generate(request("good", "mine", max_tokens=400))
    start = next(first)
    code, details = refusal(it.stub.Generate(request(request_id="mine")))
    assert (code, "'mine' is in use" in details) == (Code.ALREADY_EXISTS, True)
    assert text_of([start, *first]) == "good" * 100
    assert text_of(it.stub.Generate(request(request_id="mine", max_tokens=3))) == "abc"


def test_bytes_that_are_no_message_are_an_invalid_argument(it):
    call = it.channel.unary_stream("/jaxserve.v1.Generation/Generate")
    for data in (b"\xff\xff", b"\x0a\x01\xff", b"\x12\x7fa"):
        assert refusal(call(data))[0] is Code.INVALID_ARGUMENT
    assert refusal(it.channel.unary_stream("/jaxserve.v1.Generation/Gen")(b""))[0] is Code.UNIMPLEMENTED


def test_a_message_over_the_limit_is_refused(it):
    assert refusal(it.stub.Generate(request("x" * (17 << 20))))[0] is Code.RESOURCE_EXHAUSTED


def test_a_cancelled_call_aborts_its_request(it):
    aborted = it.info().metrics["aborted"]
    call = it.stub.Generate(request(max_tokens=LONG))
    next(call)
    call.cancel()
    it.settled(running=0, aborted=aborted + 1)


def test_a_channel_that_goes_away_aborts_its_requests(it):
    aborted = it.info().metrics["aborted"]

    async def main():
        async with grpc.aio.insecure_channel(it.address) as channel:
            stub = rpc.GenerationStub(channel)
            calls = [stub.Generate(request(max_tokens=LONG)) for _ in range(8)]
            await asyncio.gather(*(call.read() for call in calls))

    it.run(main())
    it.settled(running=0, aborted=aborted + 8)


def test_a_deadline_ends_the_call_and_the_request(it):
    aborted = it.info().metrics["aborted"]
    assert refusal(it.stub.Generate(request(max_tokens=LONG), timeout=0.3))[0] is Code.DEADLINE_EXCEEDED
    it.settled(running=0, aborted=aborted + 1)


@pytest.mark.parametrize("timeout_s", [60.0, 1e9])
def test_a_far_deadline_changes_nothing(it, timeout_s):
    assert text_of(it.stub.Generate(request(max_tokens=3), timeout=timeout_s)) == "abc"


def test_a_deadline_that_has_passed_is_refused_before_the_engine():
    class Late:
        def time_remaining(self):
            return 0.0

    generation = service.Generation("m")
    generation.engine = object()  # which nobody calls
    with pytest.raises(service.Refusal, match="had passed") as caught:
        asyncio.run(generation.Generate(request(), Late()))
    assert caught.value.code is Code.DEADLINE_EXCEEDED


def test_an_end_by_the_engines_own_clock_is_a_deadline_too():
    late = CompletionOutput(index=0, text="", token_ids=[], finish_reason="abort", stop_reason="deadline")
    done = CompletionOutput(index=1, text="a", token_ids=[97], finish_reason="length")
    output = RequestOutput(request_id="r", prompt=None, prompt_token_ids=[1], outputs=[late, done], finished=True)
    with pytest.raises(service.Refusal, match="before the answer was complete") as caught:
        service.Generation("m")._check_not_cut(output)
    assert caught.value.code is Code.DEADLINE_EXCEEDED


def test_abort_ends_the_stream_and_ignores_unknown_ids(it):
    call = it.stub.Generate(request(max_tokens=LONG))
    first = next(call)
    it.stub.Abort(pb.AbortRequest(request_ids=["nobody", first.request_id]))
    *_, last = call
    assert last.completion.finish_reason == "abort"
    it.settled(running=0)


def test_model_info_tells_limits_and_the_models_defaults(it):
    info = it.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.name, info.max_model_len, info.vocab_size, info.max_logprobs) == ("echo", 4096, 128, 20)
    defaults = info.default_sampling_params
    assert (defaults.top_k, defaults.top_p, defaults.max_tokens, defaults.n) == (7, 1.0, 16, 1)
    assert not defaults.HasField("seed")


def test_server_info_counts_what_runs(it):
    call = it.stub.Generate(request(max_tokens=LONG))
    next(call)
    info = it.info()
    assert (info.state, info.num_active_requests, info.metrics["running"]) == ("serving", 1, 1)
    assert info.version == "0.1.0"
    assert info.uptime_s > 0
    call.cancel()
    it.settled(running=0)


def test_unset_fields_are_left_to_the_models_defaults():
    defaults = SamplingParams(top_p=0.5, max_tokens=99)
    params = messages.params_of(pb.GenerateRequest(), defaults)
    assert (params.top_p, params.max_tokens, params.repetition_penalty) == (0.5, 99, 1.0)
    given = messages.params_of(request(top_p=0.25, logit_bias={7: 2.0}, skip_special_tokens=False), defaults)
    assert (given.top_p, given.logit_bias, given.skip_special_tokens) == (0.25, {7: 2.0}, False)


def test_every_sampling_field_has_its_place_in_the_library():
    params = SamplingParams(
        n=2, stop=["x"], stop_token_ids=[1], seed=5, logit_bias={1: 2.0}, allowed_token_ids=[3], bad_words=["w"],
        logprobs=2, prompt_logprobs=3, min_p=0.1, ignore_eos=True, output_kind=messages.RequestOutputKind.DELTA,
    )  # fmt: skip
    message = messages.params_message(params)
    unset = {f.name for f in message.DESCRIPTOR.fields} - {f.name for f, _ in message.ListFields()}
    assert unset == {"structured_outputs"}
    assert messages.params_of(pb.GenerateRequest(sampling_params=message), SamplingParams()) == params
