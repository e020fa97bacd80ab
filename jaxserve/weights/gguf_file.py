"""The GGUF container: header, metadata and tensor table, read once; tensor data stays in the file until asked for.

Layout (ggml's docs/gguf.md): magic, version, counts, key-value pairs, tensor table, padding, tensor data. The gguf
package's own reader makes several numpy views per array element (2.6 s for the demo model's vocabulary, against 0.1 s
here), and this one checks every length against the file, so that a damaged file is named as such.
"""

import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.exceptions import WeightsError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_NESTING = 8  # of arrays in arrays
_CHUNK_ELEMENTS = 1 << 17  # dequantised at a time: temporaries stay in the cache

_KINDS: dict[str, Callable[[Any], bool]] = {
    "an integer": lambda value: type(value) is int,
    "an integer of 0 or more": lambda value: type(value) is int and 0 <= value < 2**31,
    "a positive integer": lambda value: type(value) is int and 0 < value < 2**31,
    "a positive number": lambda value: type(value) in (int, float) and 0 < value < 1e38,
    "a boolean": lambda value: type(value) is bool,
    "a string": lambda value: type(value) is str,
    "a list of strings": lambda value: type(value) is list and all(type(x) is str for x in value),
    "a list of integers": lambda value: type(value) is list and all(type(x) is int for x in value),
    "a list of numbers": lambda value: type(value) is list and all(type(x) in (int, float) for x in value),
}

READABLE_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")


def checked(metadata: Mapping[str, Any], key: str, kind: str, default: Any = None) -> Any:
    """The value under `key`, `default` if there is none.

    Args:
      kind: what it must be, one of `_KINDS`.

    Raises:
      WeightsError: it is something else.
    """
    if key not in metadata:
        return default
    if not _KINDS[kind](metadata[key]):
        raise WeightsError(f"GGUF metadata: {key} must be {kind}, got {metadata[key]!r:.80}; convert the model again")
    return metadata[key]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """One entry of the tensor table. `shape` is numpy's order (rows first), the reverse of what the file says."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """`metadata`: key -> value; `tensors`: name -> GGUFTensor.

    Raises:
      WeightsError: not a GGUF file, a version or tensor type that is not supported, a damaged or truncated file.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as f:
            magic = f.read(4)
        if magic != b"GGUF":
            raise WeightsError(f"{path}: a GGUF file starts with b'GGUF', this one with {magic!r}")
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError, MemoryError, OverflowError) as error:
            raise WeightsError(f"{path}: damaged or truncated GGUF header ({error}); download it again") from error

    def _read_header(self) -> None:
        cursor = _Cursor(memoryview(self._data))
        cursor.at = 4
        (version,) = cursor.unpack("I")
        if version not in (2, 3):
            raise WeightsError(f"{self.path}: GGUF version must be 2 or 3, got {version}; convert the model again")
        num_tensors, num_pairs = cursor.unpack("QQ")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = cursor.string()
            try:
                self.metadata[key] = cursor.value(cursor.unpack("I")[0])
            except struct.error as error:
                raise struct.error(f"{key:.80}: {error}") from error
        entries = [cursor.tensor_entry() for _ in range(num_tensors)]
        alignment = checked(self.metadata, "general.alignment", "a positive integer", 32)
        start = -(-cursor.at // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, type_, start + at) for name, shape, type_, at in entries}

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        try:
            type_ = gguf.GGMLQuantizationType(type_id)
        except ValueError:
            raise WeightsError(f"{self.path}: tensor {name} has the unknown type {type_id}; {_readable()}") from None
        if type_.name not in READABLE_TYPES:
            raise WeightsError(f"{self.path}: tensor {name} has the unsupported type {type_.name}; {_readable()}")
        if 0 in shape:
            raise WeightsError(f"{self.path}: tensor {name} is empty: its shape is {shape}; download it again")
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        if shape[-1] % block_size:
            raise WeightsError(f"{self.path}: tensor {name}: {type_.name} needs rows of {block_size} n, got {shape}")
        num_bytes = math.prod(shape) // block_size * block_bytes
        if offset + num_bytes > self._data.size:
            raise WeightsError(
                f"{self.path}: truncated: tensor {name} ends at byte {offset + num_bytes}, the file has "
                f"{self._data.size}; download it again"
            )
        return GGUFTensor(name=name, shape=shape, type=type_.name, offset=offset, num_bytes=num_bytes)

    def rows(self, name: str) -> np.ndarray:
        """The tensor's bytes as they lie in the file, u8 [shape[:-1]..., bytes a row]: a view, nothing is read."""
        tensor = self.tensors[name]
        data = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        return data.reshape(*tensor.shape[:-1], -1)


def dequantize_into(rows: np.ndarray, type_name: str, out: np.ndarray) -> None:
    """Fills `out` [R, C] (any float dtype) from the encoded `rows` u8 [R, bytes], a few rows at a time."""
    type_ = gguf.GGMLQuantizationType[type_name]
    step = max(1, _CHUNK_ELEMENTS // out.shape[-1])
    for lo in range(0, len(rows), step):
        # As one long row: blocks do not depend on rows, and the package would take 16 rows a turn.
        encoded = np.ascontiguousarray(rows[lo : lo + step]).reshape(1, -1)
        out[lo : lo + step] = gguf.dequantize(encoded, type_).reshape(-1, out.shape[-1])


def _readable() -> str:
    return f"those that can be read are {', '.join(READABLE_TYPES)}"


class _Cursor:
    """Reads little-endian values one after the other; running off the end raises struct.error."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def unpack(self, fields: str) -> tuple:
        layout = struct.Struct("<" + fields)
        self.at += layout.size
        return layout.unpack_from(self.data, self.at - layout.size)

    def string(self) -> str:
        (length,) = self.unpack("Q")
        self._require(length)
        self.at += length
        return str(self.data[self.at - length : self.at], "utf-8")

    def value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            element_type, length = self.unpack("IQ")
            return self._array(element_type, length, depth + 1)
        if type_id not in _SCALARS:
            raise struct.error(f"unknown value type {type_id}")
        (value,) = self.unpack(_SCALARS[type_id])
        return float(str(np.float32(value))) if type_id == _FLOAT32 else value  # 1e-05, not 9.999999747378752e-06

    def _array(self, element_type: int, length: int, depth: int) -> list:
        if depth > _MAX_NESTING:
            raise struct.error(f"arrays nested more than {_MAX_NESTING} deep")
        self._require(length)  # every element takes a byte or more: a damaged length must not allocate
        if element_type in _SCALARS:
            return list(self.unpack(f"{length}{_SCALARS[element_type]}"))
        return [self.value(element_type, depth) for _ in range(length)]

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (num_dims,) = self.unpack("I")
        self._require(8 * num_dims)
        shape = self.unpack(f"{num_dims}Q")[::-1]
        type_id, offset = self.unpack("IQ")
        return name, shape, type_id, offset

    def _require(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.at:
            raise struct.error(f"byte {self.at}: {num_bytes} bytes expected, {len(self.data) - self.at} left")
