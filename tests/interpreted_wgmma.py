"""Matmuls whose left operand is in registers, which the interpreter of jax 0.12 lacks: it takes memory only."""

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks, shared_memory

of_memory = callbacks.wgmma


@callbacks.fail_on_exception
def of_registers(*, token, mesh_location, thread, a, b, b_transforms, acc, acc_transforms, source_info):
    memory = callbacks._get_shared_memory()
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)

    def access(key, transforms):
        key = shared_memory.HostAllocationKey.from_array(key)
        return key, memory.access(key, jax.tree.map(int, callbacks._remove_noop_transforms(transforms)))

    def content(key, transforms):
        key, some = access(key, transforms)
        return np.asarray(memory.get_buffer_content(key, some, thread, logging_info=info)[0])

    before = content(acc, acc_transforms)
    after = before + np.matmul(a, content(b, b_transforms), dtype=before.dtype)
    key, some = access(acc, acc_transforms)
    memory.store_buffer_content(key, some, after, thread, logging_info=info)
    return token


def wgmma(*, a_allocation_key_as_array, **others):
    a = a_allocation_key_as_array
    if a.ndim == 1:  # an address
        return of_memory(a_allocation_key_as_array=a, **others)
    assert not others.pop("a_transforms")
    names = {"b_allocation_key_as_array": "b", "acc_allocation_key_as_array": "acc"}
    return of_registers(a=a, **{names.get(name, name): value for name, value in others.items()})


callbacks.wgmma = wgmma
