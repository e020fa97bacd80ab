"""Models by id, from a server on this machine that speaks what huggingface_hub asks for."""

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading

import huggingface_hub.constants
import pytest
from checkpoints import assert_same, expected_params, golden, write_hf

from jaxserve.exceptions import WeightsError
from jaxserve.weights import load

COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """`server.models`: id -> folder. `server.requests`: what was asked for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(body=True)

    def do_HEAD(self):
        self._answer(body=False)

    def log_message(self, *_):
        pass

    def _answer(self, *, body):
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            return self._about(*match.groups(), body)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/" + COMMIT, path):
            return self._send(json.dumps([self._entry(f) for f in self._files(match[1])]).encode(), body=body)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/" + COMMIT + "/(.+)", path):
            file = self.server.models[match[1]] / match[2]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{self._entry(file)["oid"]}"'}
            return self._send(file.read_bytes(), headers, body=body)
        return self._error(404, "EntryNotFound", body)

    def _about(self, model, revision, body):
        if model not in self.server.models:
            return self._error(404, "RepoNotFound", body)
        if model.startswith("gated/"):
            return self._error(403, "GatedRepo", body)
        if revision not in (None, "main", "v1"):
            return self._error(404, "RevisionNotFound", body)
        siblings = [{"rfilename": file.name} for file in self._files(model)]
        return self._send(json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}).encode(), body=body)

    def _files(self, model):
        return sorted(file for file in self.server.models[model].iterdir() if file.is_file())

    def _entry(self, file):
        data = file.read_bytes()
        return {"type": "file", "path": file.name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _error(self, status, code, body):
        self._send(b"{}", {"X-Error-Code": code}, status=status, body=body)

    def _send(self, data, headers=(), *, status=200, body):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **dict(headers)}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.models, server.requests = {}, []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    # huggingface_hub reads its environment when imported; test_the_endpoint_is_the_environments covers that.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def llama(hub, tmp_path):
    folder = write_hf(tmp_path / "llama", *golden("llama2"), num_files=2)
    (folder / "README.md").write_text("not needed")
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    hub.models["org/llama"] = folder
    return folder


def test_a_model_is_downloaded_by_its_id(hub, llama):
    loaded = load("org/llama", dtype="float32")
    assert_same(loaded.params, expected_params(*golden("llama2")))
    assert loaded.name == "org/llama"
    assert loaded.tokenizer.encode("abc") == [2, 3, 4]


def test_only_what_is_read_is_downloaded(hub, llama):
    load("org/llama", dtype="float32")
    files = {path.rsplit("/", 1)[1] for path in hub.requests if "/resolve/" in path}
    assert "model-00002-of-00002.safetensors" in files
    assert not files & {"README.md", "pytorch_model.bin", "consolidated.safetensors"}


def test_a_dummy_downloads_no_weights(hub, llama):
    loaded = load("org/llama", load_format="dummy")
    assert loaded.tokenizer is not None
    assert not any(path.endswith(".safetensors") for path in hub.requests)


def test_what_is_in_the_cache_needs_no_server(hub, llama):
    load("org/llama", dtype="float32")
    hub.requests.clear()
    load("org/llama", dtype="float32", revision=COMMIT)
    assert not any("/resolve/" in path for path in hub.requests)


def test_a_revision_is_passed_on(hub, llama):
    load("org/llama", dtype="float32", revision="v1")
    assert "/api/models/org/llama/revision/v1" in hub.requests


def test_an_unknown_revision(hub, llama):
    with pytest.raises(WeightsError, match="org/llama has no revision 'v7'"):
        load("org/llama", revision="v7")


def test_an_unknown_model(hub):
    with pytest.raises(WeightsError, match="'org/nothing' is no file or folder here, and the hub has no such model"):
        load("org/nothing")


def test_a_gated_model(hub, llama):
    hub.models["gated/llama"] = llama
    with pytest.raises(WeightsError, match="asks for its licence to be accepted"):
        load("gated/llama")


def test_an_impossible_id():
    with pytest.raises(WeightsError, match="no id that the hub could have"):
        load("a b/c")


def test_a_server_that_is_gone(hub, llama, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(WeightsError, match=r"org/llama could not be downloaded .* not in the cache"):
        load("org/llama")


def test_the_endpoint_is_the_environments(hub, llama, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "JAX_PLATFORMS": "cpu"}
    code = "from jaxserve.weights import hub; print(hub.download('org/llama', revision=None, weights=False))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert COMMIT in run.stdout
    assert str(tmp_path / "home") in run.stdout
