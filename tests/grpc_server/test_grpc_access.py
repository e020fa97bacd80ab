"""TLS, client certificates and the token of the gRPC example."""

import shutil
import subprocess

import grpc
import pytest
from grpc_harness import SERVICE, SERVING, Code, client, options, pb, refusal, request, rpc, server, serving, text_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates by openssl")
TOKEN = "s3cret with spaces"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A folder with a CA (ca.pem) and certificates that it signed: server.pem for 127.0.0.1, and client.pem."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    def key(name):
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")

    key("ca")
    openssl("req", "-x509", "-new", "-key", "ca.key", "-subj", "/CN=test CA", "-days", "2", "-out", "ca.pem")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        key(name)
        openssl("req", "-new", "-key", f"{name}.key", "-subj", f"/CN={name}", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return folder


def server_credentials(folder, *, mutual):
    ca = str(folder / "ca.pem") if mutual else None
    return options.server_credentials(str(folder / "server.pem"), str(folder / "server.key"), ca)


def answer(address, credentials):
    """What a client with these credentials gets, or its status."""
    with client.connect(address, credentials) as channel:
        call = rpc.GenerationStub(channel).Generate(request(max_tokens=3), timeout=10)
        try:
            return text_of(call)
        except grpc.RpcError as error:
            return error.code()


@needs_openssl
def test_tls_serves_those_who_trust_its_authority(certificates):
    with serving(ready=False, options={"credentials": server_credentials(certificates, mutual=False)}) as it:
        trusting = client.channel_credentials(str(certificates / "ca.pem"), None, None)
        with client.connect(it.address, trusting) as channel:
            client.wait_until_ready(channel, 30)
        assert answer(it.address, trusting) == "abc"
        stranger = client.channel_credentials(str(certificates / "client.pem"), None, None)  # trusts another one
        assert answer(it.address, stranger) is Code.UNAVAILABLE
        assert answer(it.address, None) is Code.UNAVAILABLE  # plain text


@needs_openssl
def test_mutual_tls_serves_only_clients_with_a_certificate(certificates):
    with serving(ready=False, options={"credentials": server_credentials(certificates, mutual=True)}) as it:
        paths = [str(certificates / name) for name in ("ca.pem", "client.pem", "client.key")]
        known = client.channel_credentials(*paths)
        with client.connect(it.address, known) as channel:
            client.wait_until_ready(channel, 30)
        assert answer(it.address, known) == "abc"
        assert answer(it.address, client.channel_credentials(paths[0], None, None)) is Code.UNAVAILABLE


@needs_openssl
def test_a_key_of_another_certificate_is_refused_at_the_start(certificates):
    pair = options.server_credentials(str(certificates / "server.pem"), str(certificates / "client.key"), None)
    with serving() as it:

        async def main():
            server.Server("127.0.0.1:0", model_name="m", credentials=pair)

        with pytest.raises(OSError, match="does the key fit the certificate"):
            it.run(main())


@pytest.mark.parametrize("files", [("c", None, None), (None, "k", None), (None, None, "ca")])
def test_half_of_a_pair_is_refused(files):
    with pytest.raises(ValueError, match="needs both --tls-cert and --tls-key"):
        options.server_credentials(*files)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.key"):
        options.server_credentials("no.pem", str(tmp_path / "no.key"), None)


def test_clients_files_come_whole():
    for files in ((None, "c", "k"), ("ca", "c", None)):
        with pytest.raises(ValueError, match="needs --tls-cert, --tls-key and --tls-ca"):
            client.channel_credentials(*files)


@pytest.fixture(scope="module")
def it():
    with serving(options={"token": TOKEN}) as running:
        yield running


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [("authorization", "Bearer wrong")],
        [("authorization", TOKEN)],
        [("authorization", "Bearer ")],
        [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer wrong")],
        [("authorization-bin", f"Bearer {TOKEN}".encode())],
    ],
)
def test_without_the_token_nothing_but_probes_is_served(it, metadata):
    unary = [
        (it.stub.Abort, pb.AbortRequest()),
        (it.stub.GetModelInfo, pb.GetModelInfoRequest()),
        (it.stub.GetServerInfo, pb.GetServerInfoRequest()),
        (it.channel.unary_unary("/inference.GRPCInferenceService/ModelMetadata"), b""),
        (it.channel.unary_unary("/jaxserve.v1.Generation/NoSuch"), b""),
    ]
    for method, message in unary:
        with pytest.raises(grpc.RpcError) as caught:
            method(message, metadata=metadata)
        assert caught.value.code() is Code.UNAUTHENTICATED
    code, details = refusal(it.stub.Generate(request(), metadata=metadata))
    assert (code, details) == (Code.UNAUTHENTICATED, "the metadata must hold authorization: Bearer <token>")


def test_probes_are_open(it):
    assert it.status("") == it.status(SERVICE) == SERVING
    watch = health_pb2_grpc.HealthStub(it.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert next(watch).status == SERVING
    watch.cancel()
    for method in ("ServerLive", "ServerReady"):
        assert it.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"") == b"\x08\x01"


def test_reflection_asks_for_the_token(it):
    with pytest.raises(grpc.RpcError) as caught:
        ProtoReflectionDescriptorDatabase(it.channel).get_services()
    assert caught.value.code() is Code.UNAUTHENTICATED


def test_with_the_token_calls_are_served(it):
    call = it.stub.Generate(request(max_tokens=3), metadata=[("authorization", f"Bearer {TOKEN}")])
    assert text_of(call) == "abc"


@pytest.mark.parametrize("token", ["", " x", "x\n", "ключ"])
def test_a_token_that_no_metadata_can_carry_is_refused(token):
    with pytest.raises(ValueError, match="printable ASCII"):
        options.check_token(token)


def test_the_token_comes_from_the_environment_too(monkeypatch):
    assert options.parser().parse_args(["--model", "m"]).token is None
    monkeypatch.setenv("JAXSERVE_TOKEN", "from the environment")
    assert options.parser().parse_args(["--model", "m"]).token == "from the environment"
    assert options.parser().parse_args(["--model", "m", "--token", "t"]).token == "t"


def test_the_engine_gets_the_options_that_were_given():
    given = ["--model", "m", "--max-num-queued-reqs", "5", "--no-async-scheduling", "--port", "0"]
    engine = options.engine_options(options.parser().parse_args(given))
    assert engine == {"model": "m", "max_num_queued_reqs": 5, "async_scheduling": False}
