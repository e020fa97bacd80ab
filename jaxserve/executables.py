"""Step programs compiled for this machine, and kept on disk under a key that takes no trace to find.

JAX's own cache is keyed by the lowered program: every start traces and lowers all of them again, one after the other
under Python's lock, which takes longer than all the rest of a start. Here the key is what a program follows from: the
function, the shapes of its arguments, the model's configuration, the code of this package, the versions and the device.
"""

import functools
import hashlib
import logging
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxserve.models.base import Model

logger = logging.getLogger(__name__)

COMPILER_OPTIONS = {
    "gpu": {
        "xla_gpu_enable_triton_gemm": False,  # they copy each layer's weights out of the stack
        "xla_gpu_autotune_level": 0,  # takes two thirds of a compile and finds nothing faster than cuBLAS's own choice
        # It counts donated buffers twice, believes memory to be short, and then computes matmuls twice to save it
        "xla_disable_hlo_passes": "rematerialization",
    }
}


def compiled(function: Any, *arguments: Any, **static: Any) -> Callable:
    """A jitted function compiled for `arguments`: shapes, and first the model where the function takes one.

    On an accelerator it comes from the folder "steps" in JAX's compilation cache, if there is one and the program was
    compiled before. A CPU's programs are tied to its instruction set, which no key tells.
    """
    cache = jax.config.jax_compilation_cache_dir
    if cache is None or jax.default_backend() == "cpu":
        return _compile(function, arguments, static)
    return load_or_compile(Path(cache) / "steps", function, arguments, static)


def load_or_compile(directory: Path, function: Any, arguments: tuple, static: dict[str, Any]) -> Callable:
    """The program from its file in `directory`; where that is missing or damaged, compiled and written there."""
    path = directory / f"{function.__name__}-{_key(function, arguments, static)}"
    try:
        return serialize_executable.deserialize_and_load(
            *pickle.loads(path.read_bytes()), execution_devices=_devices(arguments)
        )
    except FileNotFoundError:
        pass
    except Exception as error:  # whatever a damaged file raises
        logger.warning("the compiled program in %s cannot be loaded and is compiled anew: %s", path, error)
    program = _compile(function, arguments, static)
    try:
        _write(path, pickle.dumps(serialize_executable.serialize(program)))
    except OSError as error:
        logger.warning("a compiled program could not be kept in %s: %s", path, error)
    return program


def _compile(function: Any, arguments: tuple, static: dict[str, Any]) -> Any:
    options = COMPILER_OPTIONS.get(jax.default_backend())
    return function.lower(*arguments, **static).compile(compiler_options=options)


def _key(function: Any, arguments: tuple, static: dict[str, Any]) -> str:
    leaves, tree = jax.tree.flatten(arguments)
    device = jax.devices()[0]
    parts = (
        function.__name__,
        [str(leaf.config if isinstance(leaf, Model) else leaf) for leaf in leaves],
        str(tree),
        sorted(static.items()),
        _code(),
        (jax.__version__, device.client.platform_version, device.device_kind, jax.device_count()),
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        (jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64),
        COMPILER_OPTIONS,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _devices(arguments: tuple) -> list[Any]:
    """Where the arguments are, in the order of a mesh."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    found = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
    return sorted(found, key=lambda device: device.id) or jax.devices()[:1]


@functools.cache
def _code() -> str:
    """A digest of this package's source."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(Path(__file__).parent, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".json")):
                digest.update(Path(folder, name).read_bytes())
    return digest.hexdigest()


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, also beside other processes that write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder, "program")
        file.write_bytes(data)
        file.replace(path)
