"""The gRPC example over a fake token core: streams, refusals, cancellation, health, and its generated files."""

import asyncio
import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from echo_core import echo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_tools import protoc

from jaxserve import AsyncLLM

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpc_server"
sys.path.insert(0, str(EXAMPLE))  # a folder of scripts, no package
client, example, pb, rpc = map(importlib.import_module, ("client", "server", "generation_pb2", "generation_pb2_grpc"))

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def load_echo():
    return AsyncLLM.over(echo, {"step_s": 0.001})


class Running:
    """A server that has loaded, with a channel to it."""

    def __init__(self, server, channel):
        self.server, self.channel = server, channel
        self.engine = server.generation.engine
        self.stub, self.health = rpc.GenerationStub(channel), health_pb2_grpc.HealthStub(channel)

    async def status(self, service):
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=service))).status

    async def settled(self, **expected):
        for _ in range(200):
            metrics = await self.engine.get_metrics()
            if all(metrics[name] == value for name, value in expected.items()):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"expected {expected}, got {metrics}")


async def health_becomes(channel, service, status):
    request = health_pb2.HealthCheckRequest(service=service)
    watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout=60)
    async for response in watch:
        if response.status == status:
            break
    watch.cancel()  # the server's end waits for open calls


def sync_channel(port):
    return grpc.insecure_channel(f"127.0.0.1:{port}")


@contextlib.asynccontextmanager
async def running(load=load_echo):
    server = example.Server("127.0.0.1:0")
    task = asyncio.create_task(server.run(load))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        await health_becomes(channel, example.SERVICE, SERVING)
        try:
            yield Running(server, channel)
        finally:
            server.stop.set()
            await task


def request(text="abc", request_id="r", **params):
    return pb.GenerateRequest(text=text, request_id=request_id, sampling_params=pb.SamplingParams(**params))


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in call]
    return caught.value.code(), caught.value.details()


def test_deltas_and_then_a_completion_for_each_sample():
    async def main():
        async with running() as it:
            responses = [r async for r in it.stub.Generate(request(n=2, max_tokens=7, temperature=1.0))]
        events = [r.WhichOneof("event") for r in responses]
        assert events == ["delta"] * (len(events) - 2) + ["completion"] * 2
        for index, response in enumerate(responses[-2:]):
            completion = response.completion
            deltas = [r.delta for r in responses[:-2] if r.delta.index == index]
            assert (completion.index, completion.text, completion.finish_reason) == (index, "abcabca", "length")
            assert "".join(delta.text for delta in deltas) == completion.text
            assert [token for delta in deltas for token in delta.token_ids] == list(completion.token_ids)
            assert completion.num_prompt_tokens == 3
            assert completion.WhichOneof("stop_reason") is None
        assert {r.request_id for r in responses} == {"r"}

    asyncio.run(main())


def test_token_ids_for_a_prompt_and_an_id_from_the_server():
    async def main():
        async with running() as it:
            call = it.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[104, 105])))
            responses = [r async for r in call]
        assert responses[-1].completion.text == "hi" * 8  # max_tokens has its default, 16
        assert responses[-1].request_id

    asyncio.run(main())


def test_a_stop_string_is_named_in_the_completion():
    async def main():
        async with running() as it:
            responses = [r async for r in it.stub.Generate(request("abcdef", stop=["de"], max_tokens=100))]
            await it.settled(running=0, stopped=1)
        completion = responses[-1].completion
        assert (completion.text, completion.finish_reason, completion.stop_string) == ("abc", "stop", "de")

    asyncio.run(main())


def test_refusals_have_their_codes_and_stop_nobody():
    async def main():
        code = grpc.StatusCode
        async with running() as it:
            good = it.stub.Generate(request("good", "good", max_tokens=400))
            refusals = [
                await refusal(it.stub.Generate(call))
                for call in (
                    request(temperature=9.0),
                    request(""),
                    pb.GenerateRequest(request_id="r"),
                    request("full"),
                    request(request_id="good"),
                )
            ]
            texts = [r.completion.text async for r in good]
        assert refusals[0] == (code.INVALID_ARGUMENT, "temperature must be in [0, 2], got 9.0")
        assert [r[0] for r in refusals[1:]] == [
            code.INVALID_ARGUMENT,
            code.INVALID_ARGUMENT,
            code.RESOURCE_EXHAUSTED,
            code.INVALID_ARGUMENT,
        ]
        assert "prompt" in refusals[1][1]
        assert "prompt must be set" in refusals[2][1]
        assert "'good' is in use" in refusals[4][1]
        assert texts[-1] == "good" * 100

    asyncio.run(main())


def test_a_cancelled_call_aborts_its_request():
    async def main():
        async with running() as it:
            call = it.stub.Generate(request(max_tokens=4000))
            await call.read()
            call.cancel()
            await it.settled(running=0, aborted=1)

    asyncio.run(main())


def test_a_deadline_ends_the_call_and_the_request():
    async def main():
        async with running() as it:
            code, _ = await refusal(it.stub.Generate(request(max_tokens=4000), timeout=0.3))
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            await it.settled(running=0, aborted=1)

    asyncio.run(main())


def test_abort_ends_the_stream_and_ignores_unknown_ids():
    async def main():
        async with running() as it:
            call = it.stub.Generate(request(max_tokens=4000))
            first = await anext(aiter(call))
            await it.stub.Abort(pb.AbortRequest(request_ids=["nobody", first.request_id]))
            responses = [r async for r in call]
            assert responses[-1].completion.finish_reason == "abort"
            await it.settled(running=0, aborted=1)

    asyncio.run(main())


def test_health_follows_the_engine(caplog):
    async def main():
        async with running() as it:
            assert await it.status("") == SERVING
            assert await it.status(example.SERVICE) == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.status("no.such.Service")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            call = it.stub.Generate(request(max_tokens=4000))
            await anext(aiter(call))
            os.kill(it.engine._process.pid, signal.SIGKILL)
            code, details = await refusal(call)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "killed by SIGKILL" in details
            await health_becomes(it.channel, "", NOT_SERVING)
            assert [r.message for r in caplog.records if "died" in r.message] == [f"the engine died: {details}"]
            with pytest.raises(ConnectionError, match="engine died"), sync_channel(it.server.port) as channel:
                await asyncio.to_thread(client.wait_until_ready, channel, 10.0)
            assert await it.status(example.SERVICE) == NOT_SERVING

    asyncio.run(main())


def test_before_the_model_is_loaded_health_is_alive_but_not_ready():
    async def main():
        server = example.Server("127.0.0.1:0")
        go_on = asyncio.Event()
        loop = asyncio.get_running_loop()

        def load():
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            return load_echo()

        task = asyncio.create_task(server.run(load))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            await channel.channel_ready()
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest(service=""))).status == SERVING
            ready = await health.Check(health_pb2.HealthCheckRequest(service=example.SERVICE))
            assert ready.status == NOT_SERVING
            code, details = await refusal(rpc.GenerationStub(channel).Generate(request()))
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "loading" in details
        server.stop.set()
        go_on.set()
        await task

    asyncio.run(main())


def test_a_port_in_use_is_an_error():
    async def main():
        async with running() as it:
            with pytest.raises(RuntimeError, match="Failed to bind"):
                example.Server(f"127.0.0.1:{it.server.port}")

    asyncio.run(main())


def test_the_client_prints_the_stream(capsys):
    def ask(port):
        with sync_channel(port) as channel:
            return client.stream(channel, request(max_tokens=9))

    async def main():
        async with running() as it:
            return await asyncio.to_thread(ask, it.server.port)

    assert asyncio.run(main()).text == "abc" * 3
    assert capsys.readouterr().out == "abc" * 3


def test_the_client_waits_for_the_model_and_asks_then(capsys):
    async def main():
        server = example.Server("127.0.0.1:0")
        go_on = asyncio.Event()
        loop = asyncio.get_running_loop()

        def load():
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            return load_echo()

        task = asyncio.create_task(server.run(load))
        address = f"127.0.0.1:{server.port}"
        asked = asyncio.create_task(asyncio.to_thread(client.ask, address, request(max_tokens=3), 60))
        while "the server loads its model" not in (err := capsys.readouterr().err):
            await asyncio.sleep(0.01)
        assert err.count("\n") == 1
        go_on.set()
        completion = await asked
        server.stop.set()
        await task
        return completion

    assert asyncio.run(asyncio.wait_for(main(), 60)).text == "abc"


def run_client(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["client.py", "hi", *arguments])
    with pytest.raises(SystemExit) as caught:
        client.main()
    return caught.value.code


@pytest.mark.parametrize("count", ["-3", "0", "4294967296"])
def test_the_client_names_a_bad_number_of_tokens(monkeypatch, count):
    expected = f"error: --max-tokens must be in [1, 4294967295], got {count}"
    assert run_client(monkeypatch, "--max-tokens", count) == expected


def test_what_the_client_cannot_do_is_one_line(monkeypatch):
    async def main():
        async with running() as it:
            address = f"127.0.0.1:{it.server.port}"
            return await asyncio.to_thread(run_client, monkeypatch, "--address", address, "--temperature", "9")

    assert asyncio.run(main()) == "error: INVALID_ARGUMENT: temperature must be in [0, 2], got 9.0"
    monkeypatch.setattr(client, "CONNECT_S", 0.1)
    assert run_client(monkeypatch, "--address", "127.0.0.1:1") == "error: no server answers at 127.0.0.1:1"


@pytest.mark.parametrize("script", ["server.py", "client.py"])
def test_without_the_extra_each_script_says_what_to_install(script):
    program = f"import runpy, sys; sys.modules['grpc'] = None; sys.path.insert(0, {str(EXAMPLE)!r}); "
    program += f"runpy.run_path({str(EXAMPLE / script)!r}, run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == (
        "error: grpc is not installed; at the root of the checkout: "
        '.venv/bin/pip install -e ".[grpc]", then run this with .venv/bin/python\n'
    )


@pytest.mark.full
def test_the_scripts_serve_the_demo_model_and_end_on_sigterm():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(EXAMPLE / "server.py"), "--port", "0", "--max-model-len", "256"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().split()[-1]
            with grpc.insecure_channel(address) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(
                    health_pb2.HealthCheckRequest(service=example.SERVICE), wait_for_ready=True, timeout=300
                )
                assert any(response.status == SERVING for response in watch)
                watch.cancel()
            ask = [sys.executable, str(EXAMPLE / "client.py"), "The capital of France is", "--temperature", "0"]
            asked = subprocess.run(
                [*ask, "--max-tokens", "8", "--address", address], stdout=subprocess.PIPE, text=True, check=True
            )
            assert "Paris" in asked.stdout
            assert asked.stdout.endswith("[length, 8 tokens]\n")
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_every_scalar_of_the_protocol_says_whether_it_is_set():
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            assert field.is_repeated or field.has_presence, f"{message.name}.{field.name} must be optional"


def test_unset_fields_are_left_to_the_library():
    params = example.params_of(pb.SamplingParams())
    assert (params.top_p, params.repetition_penalty, params.skip_special_tokens) == (1.0, 1.0, True)
    given = example.params_of(pb.SamplingParams(top_p=0.5, logit_bias={7: 2.0}, skip_special_tokens=False))
    assert (given.top_p, given.logit_bias, given.skip_special_tokens) == (0.5, {7: 2.0}, False)


@pytest.mark.parametrize("name", ["generation_pb2.py", "generation_pb2_grpc.py"])
def test_the_generated_files_are_those_of_the_proto(name, tmp_path):
    arguments = ["protoc", f"-I{EXAMPLE}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    assert protoc.main([*arguments, "generation.proto"]) == 0
    assert _without_versions(tmp_path / name) == _without_versions(EXAMPLE / name)


def _without_versions(path):
    """The tools write their own versions into the file; those may differ."""
    text = path.read_text()
    text = re.sub(r"# Protobuf Python Version: .*|GRPC_GENERATED_VERSION = .*", "", text)
    return re.sub(r"(Domain\.PUBLIC,)[\s\d,]*", r"\1", text)
