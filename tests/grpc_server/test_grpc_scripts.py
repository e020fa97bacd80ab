"""The two programs of the gRPC example, as they are started, and its generated files."""

import re
import shlex
import signal
import subprocess
import sys

import grpc
import pytest
from grpc_harness import (
    EXAMPLE,
    ROOT,
    WAIT_S,
    Code,
    client,
    environment,
    options,
    pb,
    refusal,
    request,
    rpc,
    serving,
)
from grpc_health.v1 import health_pb2
from grpc_tools import protoc


@pytest.fixture(scope="module")
def it():
    with serving(options={"token": "t"}, step_s=0.001) as running:
        yield running


def start_client(it, *arguments):
    command = [sys.executable, str(EXAMPLE / "client.py"), "abc", "--address", it.address, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(JAXSERVE_TOKEN="t")
    )


def run_client(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["client.py", "abc", *arguments])
    with pytest.raises(SystemExit) as caught:
        client.main()
    return caught.value.code


def test_the_client_prints_the_stream(it):
    with start_client(it, "--max-tokens", "9") as process:
        assert process.communicate(timeout=WAIT_S) == ("abcabcabc\n[length, 9 tokens]\n", "")
        assert process.returncode == 0


def test_ctrl_c_in_the_client_aborts_its_request(it):
    aborted = it.info().metrics["aborted"]
    with start_client(it, "--max-tokens", "4000") as process:
        assert process.stdout.read(3) == "abc"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        assert "Traceback" not in process.stderr.read()
    it.settled(running=0, aborted=aborted + 1)


def test_the_client_waits_for_the_model_and_asks_then(tmp_path, monkeypatch, capsys):
    gate = tmp_path / "gate"
    with serving(ready=False, gate=str(gate)) as it:
        monkeypatch.setattr(sys, "argv", ["client.py", "abc", "--address", it.address, "--max-tokens", "3"])

        class Stderr:
            """Opens the gate when the client says that it waits."""

            def write(self, text):
                gate.touch()
                return sys.__stderr__.write(text)

            def flush(self):
                pass

        monkeypatch.setattr(sys, "stderr", Stderr())
        client.main()
        assert gate.exists()
    assert capsys.readouterr().out == "abc\n[length, 3 tokens]\n"


@pytest.mark.parametrize("count", ["-3", "0", "4294967296"])
def test_the_client_names_a_bad_number_of_tokens(monkeypatch, count):
    expected = f"error: --max-tokens must be in [1, 4294967295], got {count}"
    assert run_client(monkeypatch, "--max-tokens", count) == expected


def test_what_the_client_cannot_do_is_one_line(it, monkeypatch):
    ask = ("--address", it.address)
    assert run_client(monkeypatch, *ask).startswith("error: UNAUTHENTICATED: the metadata must hold")
    wrong = run_client(monkeypatch, *ask, "--token", "t", "--temperature", "9")
    assert wrong == "error: INVALID_ARGUMENT: temperature must be in [0, 2], got 9.0"
    late = run_client(monkeypatch, *ask, "--token", "t", "--max-tokens", "4000", "--timeout-s", "0.2")
    assert late.startswith("error: DEADLINE_EXCEEDED: ")
    assert run_client(monkeypatch, *ask, "--tls-ca", "no.pem").startswith("error: [Errno 2]")
    monkeypatch.setattr(client, "CONNECT_S", 0.1)
    nobody = run_client(monkeypatch, "--address", "127.0.0.1:1")
    assert nobody == "error: no server answers at 127.0.0.1:1, or it wants TLS (--tls-ca)"


def test_a_dead_engine_is_no_reason_to_wait(monkeypatch, caplog):
    with serving() as it:
        assert refusal(it.stub.Generate(request("crash")))[0] is Code.UNAVAILABLE
        it.health_becomes("", health_pb2.HealthCheckResponse.NOT_SERVING)
        refused = run_client(monkeypatch, "--address", it.address)
    assert refused == "error: the server is stopping, or its engine died; its log says which"


def test_the_server_ends_well_on_sigterm():
    command = [sys.executable, str(ROOT / "tests" / "grpc_server" / "echo_server.py"), "--model", "echo", "--port", "0"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            with grpc.insecure_channel(process.stdout.readline().split()[-1]) as channel:
                client.wait_until_ready(channel, WAIT_S)
                call = rpc.GenerationStub(channel).Generate(request(max_tokens=500))
                responses = [next(call)]
                process.terminate()
                responses += call
            assert responses[-1].completion.finish_reason == "length"
            _, log = process.communicate(timeout=WAIT_S)
            assert (process.returncode, "Traceback" in log) == (0, False), log
        finally:
            process.kill()


def test_a_bad_option_ends_the_server_with_one_line():
    command = [sys.executable, str(EXAMPLE / "server.py"), "--model", "m", "--tls-cert", "c"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: TLS needs both --tls-cert and --tls-key; --tls-client-ca needs them too\n"


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
@pytest.mark.parametrize("block", [0, 1], ids=["plain", "TLS and token"])
def test_the_commands_of_the_readme_serve_the_demo_model(block, tmp_path):
    lines = re.findall(r"```sh\n(.*?)```", _readme(), flags=re.DOTALL)[block].replace("\\\n", "").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    for command in commands:
        if command[0] == "openssl":
            subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    serve, ask = (
        [sys.executable, str(ROOT / command[1]), *command[2:]]
        for command in commands
        if command[0] == ".venv/bin/python"
    )
    setting = {"cwd": tmp_path, "env": environment(JAXSERVE_TOKEN="t"), "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*serve, "--port", "0"], **setting) as process:
        try:
            address = process.stdout.readline().split()[-1]
            asked = subprocess.run([*ask, "--temperature", "0", "--address", address], **setting, check=True)
            assert "Paris" in asked.stdout
        finally:
            process.terminate()
        assert process.wait(60) == 0


def _readme():
    return (EXAMPLE / "README.md").read_text(encoding="utf-8")


def test_the_readme_names_every_option_of_both_programs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["client.py", "--help"])
    with pytest.raises(SystemExit):
        client.arguments()
    server_group = options.parser().format_help().partition("\nengine:")[0].partition("\nserver:")[2]
    given = set(re.findall(r"--[a-z][a-z-]+", server_group + capsys.readouterr().out)) - {"--help"}
    assert {name for name in given if f"`{name}" not in _readme()} == set()


def test_the_readme_names_every_status_and_call():
    for method in pb.DESCRIPTOR.services_by_name["Generation"].methods:
        assert f"`{method.name}`" in _readme()
    for code in (
        Code.INVALID_ARGUMENT, Code.ALREADY_EXISTS, Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED, Code.UNAVAILABLE,
        Code.DEADLINE_EXCEEDED, Code.UNAUTHENTICATED, Code.NOT_FOUND, Code.INTERNAL,
    ):  # fmt: skip
        assert f"`{code.name}`" in _readme()


def test_every_scalar_of_the_protocol_says_whether_it_is_set():
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            assert field.is_repeated or field.has_presence, f"{message.name}.{field.name} must be optional"


@pytest.mark.parametrize("proto", ["generation", "open_inference"])
def test_the_generated_files_are_those_of_the_proto(proto, tmp_path):
    arguments = ["protoc", f"-I{EXAMPLE}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    assert protoc.main([*arguments, f"{proto}.proto"]) == 0
    for name in (f"{proto}_pb2.py", f"{proto}_pb2_grpc.py"):
        assert _without_versions(tmp_path / name) == _without_versions(EXAMPLE / name)


def _without_versions(path):
    """The tools write their own versions into the file; those may differ."""
    text = path.read_text()
    text = re.sub(r"# Protobuf Python Version: .*|GRPC_GENERATED_VERSION = .*", "", text)
    return re.sub(r"(Domain\.PUBLIC,)[\s\d,]*", r"\1", text)
