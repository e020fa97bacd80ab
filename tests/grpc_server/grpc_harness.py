"""What the tests of the gRPC example share: a server process over a fake token core, and clients of it."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpc_server"
sys.path.insert(0, str(EXAMPLE))  # a folder of scripts, no package
client, guard, messages, options, service = map(
    importlib.import_module, ("client", "guard", "messages", "options", "service")
)
pb, rpc = map(importlib.import_module, ("generation_pb2", "generation_pb2_grpc"))

SERVICE, KSERVE_SERVICE = "jaxserve.v1.Generation", "inference.GRPCInferenceService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
WAIT_S = 30.0
Code = grpc.StatusCode


def environment(**variables):
    paths = [str(ROOT), str(ROOT / "tests")]
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths), **variables}


class Running:
    """A server process and a plain channel to it."""

    def __init__(self, process, address):
        self.process, self.address = process, address
        self.channel = grpc.insecure_channel(address)
        self.stub = rpc.GenerationStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def status(self, name, **call):
        return self.health.Check(health_pb2.HealthCheckRequest(service=name), **call).status

    def health_becomes(self, name, status):
        watch = self.health.Watch(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True, timeout=WAIT_S)
        assert any(response.status == status for response in watch)
        watch.cancel()

    def info(self):
        return self.stub.GetServerInfo(pb.GetServerInfoRequest())

    def settled(self, **expected):
        """Waits until the engine's counters have these values, and no call of Generate is open."""
        end = time.monotonic() + WAIT_S
        while (info := self.info()).num_active_requests or any(info.metrics[k] != v for k, v in expected.items()):
            assert time.monotonic() < end, f"expected {expected}, got {info}"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(*arguments, ready=True, exit_code=0, variables=None, **config):
    """The example's server over EchoCore; at the end it gets SIGTERM, unless it has, and must end well."""
    command = [sys.executable, str(Path(__file__).parent / "echo_server.py"), json.dumps(config)]
    command += ["--model", "echo", "--port", "0", *arguments]
    with subprocess.Popen(
        command, env=environment(**(variables or {})), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        running = Running(process, process.stdout.readline().split()[-1])
        try:
            if ready:
                running.health_becomes(SERVICE, SERVING)
            yield running
            running.channel.close()
            process.terminate()
            _, errors = process.communicate(timeout=WAIT_S)
            assert process.returncode == exit_code, errors
            assert "Traceback" not in errors, errors
        finally:
            process.kill()


def request(text="abc", request_id=None, stream=None, **params):
    return pb.GenerateRequest(
        text=text, request_id=request_id, stream=stream, sampling_params=pb.SamplingParams(**params)
    )


def refusal(call):
    """The status of a call that must fail; takes what comes before."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("expected a refusal, the call ended well")


def text_of(responses, index=0):
    return "".join(r.delta.text for r in responses if r.HasField("delta") and r.delta.index == index)
