"""Step programs compiled for this machine, and kept on disk under a key that takes no trace to find.

JAX's own cache is keyed by the lowered program: every start traces and lowers all of them again, one after the other
under Python's lock, which takes longer than all the rest of a start. Here the key is what a program follows from: the
function, the shapes of its arguments, the model's configuration, the code of this package, the versions and the device.

Kept is what `compile_process` compiles, for one GPU. What this process compiles may have come from JAX's cache, and
that does not serialise again.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jaxlib.version import __version__ as jaxlib_version

from jaxserve.models.base import Model
from jaxserve.pallas_kernels.target import target_device

logger = logging.getLogger(__name__)

COMPILER_OPTIONS = {
    "gpu": {
        "xla_gpu_enable_triton_gemm": False,  # they copy each layer's weights out of the stack
        "xla_gpu_autotune_level": 0,  # takes two thirds of a compile and finds nothing faster than cuBLAS's own choice
        # It counts donated buffers twice, believes memory to be short, and then computes matmuls twice to save it
        "xla_disable_hlo_passes": "rematerialization",
    }
}
OUTDATED_S = 30 * 24 * 3600  # after which the programs of other versions of this package are deleted

# (function, arguments, static) -> the serialised program; None = no, compile it yourself
Elsewhere = Callable[[Any, tuple, dict[str, Any]], bytes | None]


def compiled(function: Any, *arguments: Any, elsewhere: Elsewhere | None = None, **static: Any) -> Callable:
    """A jitted function compiled for `arguments`: shapes, and first the model where the function takes one.

    On a GPU it comes from the folder "steps" in JAX's compilation cache, if there is one and the program was compiled
    before; else from `elsewhere`; else it is compiled here.
    """
    folder = kept_in()
    if folder is None or len(_devices(arguments)) != 1:
        return compile_here(function, arguments, static)
    return load_or_compile(folder, function, arguments, static, elsewhere)


def kept_in() -> Path | None:
    """The folder of this code's programs; None where none are kept."""
    cache, code = jax.config.jax_compilation_cache_dir, _code()
    if jax.default_backend() != "gpu" or code is None or not jax.config.jax_enable_compilation_cache:
        return None
    return None if not cache or "://" in cache else Path(cache) / "steps" / code


def load_or_compile(
    folder: Path, function: Any, arguments: tuple, static: dict[str, Any], elsewhere: Elsewhere | None = None
) -> Callable:
    """The program from its file in `folder`; where that is missing or damaged, from elsewhere, and written there."""
    path = folder / f"{function.__name__}-{_key(function, arguments, static)}"
    if os.path.exists(path):
        program = _loaded(lambda: _own_bytes(path), arguments, str(path))
        if program is not None:
            with contextlib.suppress(OSError):
                os.utime(folder)  # it is in use
            return program
    data = elsewhere(function, arguments, static) if elsewhere else None
    if data is not None:
        program = _loaded(lambda: data, arguments, "another process")
        if program is not None:
            _keep(path, data)
            return program
    return compile_here(function, arguments, static)


def compile_here(function: Any, arguments: tuple, static: dict[str, Any]) -> Any:
    options = COMPILER_OPTIONS.get(target_device().platform)
    return function.lower(*arguments, **static).compile(compiler_options=options)


def serialized(program: Any) -> bytes:
    return pickle.dumps(serialize_executable.serialize(program))


def setting() -> tuple:
    """All that a program follows from besides the function and its arguments."""
    device = jax.devices()[0]
    return (
        code_and_versions(),
        (device.client.platform_version, device.device_kind, jax.device_count()),
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        (jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64, jax.config.jax_default_prng_impl),
        COMPILER_OPTIONS,
    )


def code_and_versions() -> tuple:
    return _code(), jax.__version__, jaxlib_version


def _key(function: Any, arguments: tuple, static: dict[str, Any]) -> str:
    leaves, tree = jax.tree.flatten(arguments)
    described = [str((leaf.config, leaf.sparse) if isinstance(leaf, Model) else leaf) for leaf in leaves]
    parts = (function.__name__, described, str(tree), sorted(static.items()), _devices(arguments), setting())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _devices(arguments: tuple) -> list[Any]:
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    found = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
    return sorted(found, key=lambda device: device.id) or jax.devices()[:1]


@functools.cache
def _code() -> str | None:
    """A digest of this package's source; None where that is not in files."""
    digest, num_files = hashlib.sha256(), 0
    for folder, folders, names in os.walk(Path(__file__).parent, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".json")):
                digest.update(Path(folder, name).read_bytes())
                num_files += 1
    return digest.hexdigest()[:16] if num_files else None


def _loaded(read: Callable[[], bytes], arguments: tuple, source: str) -> Callable | None:
    """The program that is read; None, after a warning, where that fails."""
    try:
        program = pickle.loads(read())
        return serialize_executable.deserialize_and_load(*program, execution_devices=_devices(arguments))
    except Exception as error:  # whatever damaged bytes raise
        logger.warning("the compiled program of %s cannot be loaded and is compiled anew: %s", source, error)
        return None


def _own_bytes(path: Path) -> bytes:
    """What is in a file that this user has written: loading a program runs code.

    Raises:
        PermissionError: it belongs to another user.
    """
    if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
        raise PermissionError("it belongs to another user")
    return path.read_bytes()


def _keep(path: Path, data: bytes) -> None:
    try:
        _write(path, data)
    except OSError as error:
        _warn_once(f"compiled programs could not be kept in {path.parent}: {error}")


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, also beside other processes that write the same."""
    folder = path.parent
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for other in folder.parent.iterdir():
            if other.stat().st_mtime < time.time() - OUTDATED_S:
                shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        file = Path(temporary, "program")
        file.write_bytes(data)
        file.replace(path)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
