"""Health, the KServe facade, reflection, and the ways in which the gRPC example's server ends."""

import socket

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_harness import (
    KSERVE_SERVICE,
    NOT_SERVING,
    SERVICE,
    SERVING,
    WAIT_S,
    Code,
    Running,
    guard,
    pb,
    refusal,
    request,
    server,
    serving,
    text_of,
)
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

LONG = 4000


def refused(call):
    """The status of a unary call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def kserve(it, method, data=b""):
    """A call of the standard's service in bytes made by hand: these tests must not trust our own copy of its proto."""
    return it.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(data, timeout=WAIT_S)


def test_loading_serving_draining(tmp_path):
    gate = tmp_path / "gate"
    with serving(ready=False, gate=str(gate), step_s=0.001) as it:
        assert it.status("", wait_for_ready=True) == SERVING
        assert it.status(SERVICE) == it.status(KSERVE_SERVICE) == NOT_SERVING
        assert it.info().state == "loading"
        assert kserve(it, "ServerLive") == b"\x08\x01"
        assert kserve(it, "ServerReady") == kserve(it, "ModelReady", b"\x0a\x04echo") == b""
        code, details = refusal(it.stub.Generate(request()))
        assert (code, "loading" in details) == (Code.UNAVAILABLE, True)
        for call in (it.stub.Abort, it.stub.GetModelInfo):
            message = pb.AbortRequest() if call is it.stub.Abort else pb.GetModelInfoRequest()
            assert refused(lambda call=call, message=message: call(message))[0] is Code.UNAVAILABLE
        gate.touch()
        it.health_becomes(SERVICE, SERVING)
        assert it.status(KSERVE_SERVICE) == SERVING
        assert kserve(it, "ServerReady") == kserve(it, "ModelReady", b"\x0a\x04echo") == b"\x08\x01"
        assert refused(lambda: it.status("no.such.Service"))[0] is Code.NOT_FOUND

        call = it.stub.Generate(request(max_tokens=1500))
        start = next(call)
        it.interrupt()
        it.health_becomes(SERVICE, NOT_SERVING)
        assert it.status("") == it.status(KSERVE_SERVICE) == NOT_SERVING
        assert it.info().state == "draining"
        code, details = refusal(it.stub.Generate(request()))
        assert (code, "stopping" in details) == (Code.UNAVAILABLE, True)
        rest = list(call)
        assert text_of([start, *rest]) == "abc" * 500
        assert rest[-1].completion.finish_reason == "length"


@pytest.mark.parametrize("how", ["grace", "second signal"])
def test_what_still_runs_after_the_grace_is_cut(how):
    with serving(options={"grace_s": 0.3 if how == "grace" else 60.0}, step_s=0.001) as it:
        call = it.stub.Generate(request(max_tokens=LONG))
        next(call)
        watch = it.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(watch).status == SERVING
        it.interrupt()
        assert next(watch).status == NOT_SERVING
        if how == "second signal":
            it.interrupt()
        code, details = refusal(call)
        assert (code, "stopped before" in details) == (Code.UNAVAILABLE, True)
        assert it.ended() is None  # although a watcher is still there


def test_an_interrupt_during_the_load_ends_at_once(tmp_path):
    with serving(ready=False, gate=str(tmp_path / "gate")) as it:
        assert it.status("", wait_for_ready=True) == SERVING
        it.interrupt()
        assert it.ended() is None
        (tmp_path / "gate").touch()  # for the engine's process, which ends when it has loaded


def test_a_dead_engine_is_told_by_every_probe(caplog):
    with serving(step_s=0.001) as it:
        call = it.stub.Generate(request(max_tokens=LONG))
        next(call)
        code, details = refusal(it.stub.Generate(request("crash")))
        assert (code, "planted fault" in details) == (Code.UNAVAILABLE, True)
        assert refusal(call)[0] is Code.UNAVAILABLE
        it.health_becomes("", NOT_SERVING)
        assert it.status(SERVICE) == NOT_SERVING
        assert it.info().state == "dead"
        assert kserve(it, "ServerLive") == kserve(it, "ServerReady") == b""
        assert refusal(it.stub.Generate(request()))[0] is Code.UNAVAILABLE
        assert [r.message for r in caplog.records if "died" in r.message] == [f"the engine died: {details}"]


def test_a_model_that_cannot_load_ends_the_server():
    it = Running({"fail": True}, {"model_name": "echo"})
    assert "no such weights, as planted" in str(it.ended())
    it.channel.close()


@pytest.fixture(scope="module")
def it():
    with serving(options={"model_name": "my-model"}, step_s=0.001) as running:
        yield running


def test_the_standards_clients_get_the_standards_answers(it):
    name = b"\x0a\x08my-model"
    assert kserve(it, "ServerMetadata") == b"\x0a\x08jaxserve\x12\x050.1.0"
    assert kserve(it, "ModelMetadata", name) == name + b"\x12\x011" + b"\x1a\x08jaxserve"
    assert kserve(it, "ModelReady", name + b"\x12\x011") == b"\x08\x01"
    for method in ("ModelReady", "ModelMetadata"):
        for data in (b"\x0a\x05other", name + b"\x12\x012"):
            code, details = refused(lambda method=method, data=data: kserve(it, method, data))
            assert (code, "'my-model' version '1' is" in details) == (Code.NOT_FOUND, True)
    whole_request = name + b"\x2a\x0a\x0a\x01x\x12\x05BYTES" + b"\x3a\x03abc"  # with a tensor that our proto leaves out
    code, details = refused(lambda: kserve(it, "ModelInfer", whole_request))
    assert (code, "call jaxserve.v1.Generation/Generate" in details) == (Code.UNIMPLEMENTED, True)


def test_reflection_describes_every_service(it):
    database = ProtoReflectionDescriptorDatabase(it.channel)
    names = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", SERVICE, KSERVE_SERVICE}
    assert set(database.get_services()) == names
    pool = DescriptorPool(database)
    methods = {method.name for method in pool.FindServiceByName(SERVICE).methods}
    assert methods == {"Generate", "Abort", "GetModelInfo", "GetServerInfo"}
    assert pool.FindMessageTypeByName("inference.ModelReadyResponse").fields_by_name["ready"].number == 1


def test_frequent_pings_are_answered_and_end_no_connection(it):
    """In frames made by hand, since the library's own client pings once a second at most."""

    def frame(kind, payload):
        return len(payload).to_bytes(3) + bytes([kind, 0]) + bytes(4) + payload

    settings, ping, goaway = 4, 6, 7
    with socket.create_connection(it.address.split(":"), timeout=WAIT_S) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings, b""))
        stream, acknowledged = connection.makefile("rb"), []
        for number in range(10):
            connection.sendall(frame(ping, number.to_bytes(8)))
            while len(acknowledged) <= number:
                header = stream.read(9)
                payload = stream.read(int.from_bytes(header[:3]))
                assert header[3] != goaway, payload
                if header[3:5] == bytes([ping, 1]):
                    acknowledged.append(int.from_bytes(payload))
    assert acknowledged == list(range(10))


def test_a_port_in_use_is_an_error(it):
    async def main():
        server.Server(it.address, model_name="echo")

    with pytest.raises(OSError, match=f"cannot listen on {it.address}: is it free?"):
        it.run(main())


def test_a_defect_is_logged_and_does_not_leak(caplog):
    code, details = guard.status_of(KeyError("secret"))
    assert (code, "secret" in details) == (Code.INTERNAL, False)
    assert "secret" in caplog.text
