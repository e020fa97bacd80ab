import contextlib
import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from one_layer import LLAMA

from jaxserve import executables
from jaxserve.executables import load_or_compile
from jaxserve.layers.kv_cache import KVCache
from jaxserve.models import get_model

traces = []  # of `new_function`'s functions


def new_function():
    """A jitted function as a new process has it: never traced."""

    @functools.partial(jax.jit, static_argnums=0, static_argnames="factor", donate_argnums=1)
    def grow(model, kv, x, *, factor):
        traces.append(factor)
        return KVCache(k=kv.k + x, v=factor * kv.v)

    return grow


@pytest.fixture(autouse=True)
def compiled_for_each_test():
    """Not taken from JAX's cache, which other tests may have switched on: that does not serialise again."""
    traces.clear()
    with jax_config(jax_enable_compilation_cache=False):
        compilation_cache.reset_cache()
        yield
    compilation_cache.reset_cache()


def elsewhere(function, arguments, static):
    return executables.serialized(executables.compile_here(function, arguments, static))


def cache(rows=4):
    return KVCache(k=jnp.zeros((rows, 2)), v=jnp.ones((rows, 2)))


def run(directory, *, rows=4, factor=3, **changes):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (cache(rows), jnp.float32(0)))
    arguments = (get_model(LLAMA | changes), *shapes)
    program = load_or_compile(directory, new_function(), arguments, {"factor": factor}, elsewhere)
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
    assert traces == [3, 3]
    assert "cannot be loaded" in caplog.text
    assert caplog.text.count("cannot be loaded") == 1


def test_what_comes_from_elsewhere_and_cannot_be_loaded_is_compiled_here(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(globals(), "elsewhere", lambda *_: b"no program")
    np.testing.assert_array_equal(run(tmp_path).v, np.full((4, 2), 3.0))
    assert "cannot be loaded" in caplog.text
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    np.testing.assert_array_equal(run(tmp_path / "file" / "steps").v, np.full((4, 2), 3.0))
    assert "could not be kept" in caplog.text


def test_programs_are_kept_for_accelerators_with_a_cache_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax_config(jax_compilation_cache_dir=str(tmp_path), jax_enable_compilation_cache=True):
        assert executables.kept_in() == tmp_path / "steps" / executables._code()
        with jax_config(jax_enable_compilation_cache=False):
            assert executables.kept_in() is None
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
        assert executables.kept_in() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for cache in (None, "gs://bucket/cache"):
        with jax_config(jax_compilation_cache_dir=cache, jax_enable_compilation_cache=True):
            assert executables.kept_in() is None


def test_a_package_without_files_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(executables, "__file__", str(tmp_path / "package.zip" / "executables.py"))
    assert executables._code.__wrapped__() is None


def test_what_another_user_has_written_is_not_run(tmp_path, monkeypatch, caplog):
    run(tmp_path)
    monkeypatch.setattr(executables.os, "getuid", lambda: 12345)
    run(tmp_path)
    assert len(traces) == 2
    assert "belongs to another user" in caplog.text


def test_programs_of_old_versions_are_deleted_when_a_new_one_writes(tmp_path):
    for name, age in (("old", executables.OUTDATED_S + 60), ("recent", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    run(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "recent"]


@contextlib.contextmanager
def jax_config(**values):
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
