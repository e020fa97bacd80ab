"""Hostile clients: whatever arrives, the answer is no INTERNAL and no UNKNOWN, and the next request is served."""

import grpc
import hypothesis
import hypothesis.strategies as st
import pytest
from grpc_harness import WAIT_S, Code, pb, request, serving, text_of

HONEST = {  # what a caller may be told; whoever sends nonsense is never told that the server is broken
    Code.OK,
    Code.CANCELLED,  # by the test, after the first few responses
    Code.INVALID_ARGUMENT,
    Code.UNIMPLEMENTED,
    Code.ALREADY_EXISTS,  # the id of a call just cancelled
    Code.RESOURCE_EXHAUSTED,
}
MANY = hypothesis.settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
METHODS = [
    ("jaxserve.v1.Generation", "Generate"),
    ("jaxserve.v1.Generation", "Abort"),
    ("jaxserve.v1.Generation", "GetModelInfo"),
    ("inference.GRPCInferenceService", "ModelReady"),
    ("inference.GRPCInferenceService", "ModelInfer"),
    ("grpc.health.v1.Health", "Check"),
]


def integers(bits, signed):
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return st.integers(max(low, -3), min(high, 130)) | st.sampled_from([low, high, high - 1]) | st.integers(low, high)


floats = st.floats() | st.sampled_from([0.0, -0.0, 1.0, 1e-300, 1e300, float("inf"), float("nan"), 0.5])
texts = st.text(max_size=20) | st.sampled_from(["", "\x00", "a" * 5000, "\U0010ffff", "abc"])
SCALARS = {
    "TYPE_UINT32": integers(32, False),
    "TYPE_INT32": integers(32, True),
    "TYPE_INT64": integers(64, True),
    "TYPE_DOUBLE": floats,
    "TYPE_BOOL": st.booleans(),
    "TYPE_STRING": texts,
}


def values(field):
    """Any value of one field."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return st.dictionaries(values(key), values(value), max_size=3)
    if field.message_type is not None:
        one = fields(field.message_type)
    else:
        name = next(n for n in SCALARS if getattr(type(field), n) == field.type)
        one = SCALARS[name]
    return st.lists(one, max_size=4) if field.is_repeated else one


def fields(descriptor):
    """Up to four of a message's fields, as keywords, and of each oneof at most one."""
    free = [f for f in descriptor.fields if f.containing_oneof is None or len(f.containing_oneof.fields) == 1]
    groups = [o.fields for o in descriptor.oneofs if len(o.fields) > 1]
    parts = [st.lists(st.sampled_from(free), max_size=4, unique=True).flatmap(keywords)] if free else []
    parts += [st.lists(st.sampled_from(list(group)), max_size=1).flatmap(keywords) for group in groups]
    return st.tuples(*parts).map(lambda found: {name: value for part in found for name, value in part.items()})


def keywords(chosen):
    return st.fixed_dictionaries({field.name: values(field) for field in chosen})


@pytest.fixture(scope="module")
def it():
    with serving() as running:
        yield running
        assert running.info().state == "serving"


def status(call):
    """Of a call that is cancelled when it has answered a few times."""
    try:
        for count, _ in enumerate(call):
            if count == 4:
                call.cancel()
    except grpc.RpcError as error:
        return error.code(), error.details()
    return Code.OK, ""


def served(it):
    return text_of(it.stub.Generate(request(max_tokens=4), timeout=WAIT_S)) == "abca"


def check(it, answer):
    hypothesis.event(answer[0].name)
    assert answer[0] in HONEST, answer
    assert served(it)


@MANY
@hypothesis.given(message=fields(pb.GenerateRequest.DESCRIPTOR))
def test_messages_of_random_fields(it, message):
    check(it, status(it.stub.Generate(pb.GenerateRequest(**message), timeout=WAIT_S)))


@MANY
@hypothesis.given(params=fields(pb.SamplingParams.DESCRIPTOR))
def test_random_sampling_params(it, params):
    check(it, status(it.stub.Generate(request("abc", **params), timeout=WAIT_S)))


@MANY
@hypothesis.given(
    method=st.sampled_from(METHODS),
    data=st.binary(max_size=60),
    cut=st.none() | st.tuples(st.integers(0, 40), st.binary(min_size=1, max_size=3)),
)
def test_random_bytes(it, method, data, cut):
    """Either the bytes as they are, or a good request with some of it overwritten."""
    if cut is not None:
        good = request("abc", "r", max_tokens=5, stop=["x"], logit_bias={5: 1.0}).SerializeToString()
        data = good[: cut[0]] + cut[1] + good[cut[0] + len(cut[1]) :]
    call = it.channel.unary_stream("/{}/{}".format(*method))
    code, details = status(call(data, timeout=WAIT_S))
    if method[1] in ("ModelReady", "Check") and code is Code.NOT_FOUND:
        code = Code.OK
    check(it, (code, details))
