import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_layer import LLAMA

from jaxserve import compile_process, executables
from jaxserve.compile_process import CompileProcess
from jaxserve.executables import load_or_compile
from jaxserve.layers.kv_cache import init_kv_cache
from jaxserve.layers.sampler import init_sequences
from jaxserve.models import get_model
from jaxserve.step_programs import StepShape, forward_step, update_tables


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # which is how many the other process has
    process = CompileProcess()
    yield process
    process.close()
    assert process._process is None


def abstract(tree):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def updated_table(folder, elsewhere):
    """What `update_tables` makes of an empty table, as `load_or_compile` has the program."""
    sequences = init_sequences(2, 2)
    updates = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    program = load_or_compile(folder, update_tables, (abstract(sequences), updates), {}, elsewhere)
    return np.asarray(program(sequences, np.array([[1, 0, 7]], np.int32)).page_table).tolist()


TABLE = [[0, 0], [7, 0], [0, 0]]


def test_it_compiles_steps_and_runs_nothing_of_the_working_directory(process, tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise SystemExit('another jax')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(executables, "compile_here", lambda *_: pytest.fail("compiled here"))
    model = get_model(LLAMA)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.abstract_params(jnp.float32))
    kv = init_kv_cache(model.config, num_pages=4, page_size=8, dtype=jnp.float32)
    arrays = (params, kv, init_sequences(2, 2))
    shape = StepShape(decode_rows=2, prefill_tokens=0, prefill_seqs=0)
    ints = jax.ShapeDtypeStruct((shape.num_ints,), jnp.int32)
    arguments = (model, *abstract(arrays), ints)
    program = load_or_compile(tmp_path / "steps", forward_step, arguments, {"shape": shape}, process.compile)
    hidden, *_ = program(*arrays, np.zeros(shape.num_ints, np.int32))
    assert hidden.shape == (2, LLAMA["hidden_size"])
    assert updated_table(tmp_path / "steps", process.compile) == TABLE
    assert len([*(tmp_path / "steps").iterdir()]) == 2


def test_with_other_settings_it_compiles_nothing(process, tmp_path, caplog):
    with jax.default_matmul_precision("highest"):
        assert updated_table(tmp_path, process.compile) == TABLE
    assert "it would compile something else" in caplog.text


def failing_executable(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")


def noise_on_stdout(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('good morning')")
    monkeypatch.syspath_prepend(tmp_path)


def a_job_that_cannot_be_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(executables, "setting", lambda: lambda: None)


@pytest.mark.parametrize("trouble", [failing_executable, noise_on_stdout, a_job_that_cannot_be_sent])
def test_where_it_fails_the_thread_compiles_with_one_warning(trouble, process, tmp_path, monkeypatch, caplog):
    trouble(tmp_path, monkeypatch)
    for folder in ("a", "b"):
        assert updated_table(tmp_path / folder, process.compile) == TABLE
    assert caplog.text.count("the thread goes on alone") == 1
    assert process._process is None


def test_what_it_wrote_before_it_died_is_in_the_warning(process, tmp_path, monkeypatch, caplog):
    (tmp_path / "sitecustomize.py").write_text("import os, sys; sys.stderr.write('no space left'); os._exit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    assert updated_table(tmp_path / "steps", process.compile) == TABLE
    assert "no space left" in caplog.text


def test_only_a_gpu_with_a_cache_has_compile_processes(tmp_path, monkeypatch):
    with compile_process.compiler() as compiled:
        assert compiled is executables.compiled
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(executables, "kept_in", lambda: tmp_path)
    with compile_process.compiler() as compiled:
        assert compiled.func is executables.compiled
        assert isinstance(compiled.keywords["elsewhere"].__self__, CompileProcess)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with compile_process.compiler() as compiled:
        assert compiled is executables.compiled
