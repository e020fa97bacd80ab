import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import executables
from jaxserve.executables import load_or_compile
from jaxserve.layers.kv_cache import KVCache, init_kv_cache
from jaxserve.layers.sampler import init_sequences
from jaxserve.models import get_model
from jaxserve.step_programs import StepShape, forward_step

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


traces = []  # of `new_function`'s functions


def new_function():
    """A jitted function as a new process has it: never traced."""

    @functools.partial(jax.jit, static_argnums=0, static_argnames="factor", donate_argnums=1)
    def grow(model, kv, x, *, factor):
        traces.append(factor)
        return KVCache(k=kv.k + x, v=factor * kv.v)

    return grow


@pytest.fixture(autouse=True)
def no_traces():
    traces.clear()


def cache(rows=4):
    return KVCache(k=jnp.zeros((rows, 2)), v=jnp.ones((rows, 2)))


def run(directory, *, rows=4, factor=3, **changes):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (cache(rows), jnp.float32(0)))
    program = load_or_compile(directory, new_function(), (get_model(LLAMA | changes), *shapes), {"factor": factor})
    return program(cache(rows), jnp.float32(2))


def test_a_program_on_disk_is_run_without_a_trace(tmp_path):
    for _ in range(2):
        found = run(tmp_path / "steps")
        np.testing.assert_array_equal(found.k, np.full((4, 2), 2.0))
        np.testing.assert_array_equal(found.v, np.full((4, 2), 3.0))
    assert traces == [3]


@pytest.mark.parametrize("change", [{"rows": 5}, {"factor": 4}, {"rms_norm_eps": 1e-3}, {"hidden_size": 64}], ids=str)
def test_what_a_program_follows_from_is_in_its_key(tmp_path, change):
    run(tmp_path)
    run(tmp_path, **change)
    assert len(traces) == 2


def test_other_code_is_another_key(tmp_path, monkeypatch):
    run(tmp_path)
    monkeypatch.setattr(executables, "_code", lambda: "another digest")
    run(tmp_path)
    assert len(traces) == 2


def test_the_digest_covers_every_part_of_the_package(monkeypatch, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "norm.py").write_text("eps = 1")
    (package / "layers").symlink_to(tmp_path / "layers")
    monkeypatch.setattr(executables, "__file__", str(package / "executables.py"))
    digests = [executables._code.__wrapped__()]
    (tmp_path / "layers" / "norm.py").write_text("eps = 2")
    digests.append(executables._code.__wrapped__())
    (package / "tilings.json").write_text("{}")
    digests.append(executables._code.__wrapped__())
    assert len(set(digests)) == 3


def test_a_damaged_file_is_written_anew(tmp_path, caplog):
    run(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    for _ in range(2):
        np.testing.assert_array_equal(run(tmp_path).v, np.full((4, 2), 3.0))
    assert "cannot be loaded" in caplog.text
    assert caplog.text.count("cannot be loaded") == 1


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    np.testing.assert_array_equal(run(tmp_path / "file" / "steps").v, np.full((4, 2), 3.0))
    assert "could not be kept" in caplog.text


@pytest.fixture
def other_process(monkeypatch):
    """What `aside` gives a thread on a GPU."""
    process = executables._Aside()
    monkeypatch.setattr(executables._this_thread, "aside", process, raising=False)
    yield process
    process.close()


def step_arguments():
    """A model and abstract arguments of `forward_step`."""
    model = get_model(LLAMA)
    config = model.config
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def make():
        kv = init_kv_cache(config, num_pages=4, page_size=8, dtype=jnp.float32)
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.abstract_params(jnp.float32))
        return params, kv, init_sequences(2, 2)

    arrays = make()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays)
    return model, arrays, abstract


def test_another_process_compiles_and_this_one_runs(tmp_path, other_process, monkeypatch):
    model, arrays, abstract = step_arguments()
    shape = StepShape(decode_rows=2, prefill_tokens=0, prefill_seqs=0)
    ints = jax.ShapeDtypeStruct((shape.num_ints,), jnp.int32)
    monkeypatch.setattr(executables, "_compile", lambda *_: pytest.fail("compiled here"))
    program = load_or_compile(tmp_path, forward_step, (model, *abstract, ints), {"shape": shape})
    hidden, *_ = program(*arrays, np.zeros(shape.num_ints, np.int32))
    assert hidden.shape == (2, LLAMA["hidden_size"])


def test_where_the_other_process_fails_this_one_compiles(tmp_path, other_process, monkeypatch, caplog):
    monkeypatch.setattr(executables.sys, "executable", "/bin/false")
    for factor in (3, 4):
        np.testing.assert_array_equal(run(tmp_path, factor=factor).v, np.full((4, 2), float(factor)))
    assert caplog.text.count("the thread goes on alone") == 1


def test_what_the_other_process_cannot_compile_this_one_says(tmp_path, other_process, caplog):
    np.testing.assert_array_equal(run(tmp_path).v, np.full((4, 2), 3.0))  # no other process knows this module
    assert "ModuleNotFoundError" in caplog.text
