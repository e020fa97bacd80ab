"""`jaxserve serve`: its options, its mistakes, and the real command from start to stop."""

import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import openai
import pytest

from jaxserve import EngineDeadError
from jaxserve.cli import engine as driver
from jaxserve.cli.options import ENGINE_OPTIONS


def test_help_lists_the_server_and_the_engine_on_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _, _ = run("serve", "--help")
    assert code == 0
    for name in (*ENGINE_OPTIONS, "host", "port", "api_key", "served_model_name", "max_request_bytes", "drain_timeout"):
        assert f"--{name.replace('_', '-')} " in out
    assert "JAXSERVE_API_KEY" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.fixture
def no_engine(monkeypatch):
    """Starting the engine fails; the options that it got are remembered."""
    asked = []

    def start_async(options):
        asked.append(options)
        raise EngineDeadError("no engine here")

    monkeypatch.setattr(driver, "start_async", start_async)
    return asked


def test_an_engine_that_cannot_start_is_exit_code_1(run, no_engine):
    code, out, err, _ = run("serve", "--model", "m", "--port", "0", "--max-num-queued-reqs", "5")
    assert (code, err) == (1, "error: no engine here\n")
    assert re.fullmatch(r"listening on http://127\.0\.0\.1:\d+, loading m\n", out)
    assert no_engine == [{"model": "m", "max_num_queued_reqs": 5}]


def test_a_taken_port_or_a_bad_key_is_one_line_and_exit_code_2(run, no_engine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err, _ = run("serve", "--model", "m", "--port", str(taken.getsockname()[1]))
    assert (code, err.count("\n")) == (2, 1)
    assert "Address already in use" in err
    code, _, err, _ = run("serve", "--model", "m", "--port", "0", "--api-key", "s e c r e t")
    assert (code, "s e c r e t" in err) == (2, False)
    assert err.startswith("error: api_keys must be made of printable ASCII")
    assert no_engine == []


@pytest.mark.parametrize("nothing", ["", "  "])
def test_a_key_variable_that_holds_nothing_starts_no_open_server(run, no_engine, monkeypatch, nothing):
    monkeypatch.setenv("JAXSERVE_API_KEY", nothing)
    code, _, err, _ = run("serve", "--model", "m", "--port", "0")
    assert (code, err) == (
        2,
        "error: JAXSERVE_API_KEY must hold a key, got nothing; unset it to serve without keys\n",
    )
    assert no_engine == []


@pytest.mark.parametrize("library", ["starlette", "uvicorn", "prometheus_client"])
def test_without_the_extra_the_way_to_it_is_told(run, monkeypatch, library):
    for name in [name for name in sys.modules if name.startswith((f"{library}.", "jaxserve.server."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    code, _, err, _ = run("serve", "--model", "m")
    assert code == 2
    assert 'pip install "jaxserve[server]"' in err


@pytest.mark.full
def test_the_command_serves_the_demo_model_until_it_is_told_to_stop(tmp_path):
    command = [sys.executable, "-c", "from jaxserve import cli; cli.main()", "serve", "--model", "smollm2-135m"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAXSERVE_API_KEY": "secret"}
    options = ["--port", "0", "--max-model-len", "256", "--warm-up", "off", "--served-model-name", "demo"]
    options += ["--profile", str(tmp_path)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        port = re.search(r":(\d+), loading smollm2-135m", process.stdout.readline())[1]
        assert process.stdout.readline() == "ready\n"
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret") as client:
            answer = client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                temperature=0,
                max_tokens=16,
            )
        assert "Paris" in answer.choices[0].message.content
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert 'jaxserve:request_success_total{finished_reason="' in metrics
        assert httpx.get(f"http://127.0.0.1:{port}/").headers["content-type"].startswith("text/html")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert list(tmp_path.rglob("*.xplane.pb"))
