"""What a user may give as `sparse_attention`."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxserve.layers.sparse.blasst import Blasst
from jaxserve.layers.sparse.compact_attention import CompactAttention
from jaxserve.layers.sparse.double_sparsity import DoubleSparsity
from jaxserve.layers.sparse.flash_prefill import FlashPrefill
from jaxserve.layers.sparse.h2o import H2O
from jaxserve.layers.sparse.hooks import Policy, SparseAttention
from jaxserve.layers.sparse.kascade import Kascade
from jaxserve.layers.sparse.lserve import LServe
from jaxserve.layers.sparse.quest import Quest
from jaxserve.layers.sparse.snapkv import SnapKV
from jaxserve.layers.sparse.streaming_llm import StreamingLLM

POLICIES: Mapping[str, type[Policy]] = {
    "blasst": Blasst,
    "compact_attention": CompactAttention,
    "double_sparsity": DoubleSparsity,
    "flash_prefill": FlashPrefill,
    "h2o": H2O,
    "kascade": Kascade,
    "lserve": LServe,
    "quest": Quest,
    "snapkv": SnapKV,
    "streaming_llm": StreamingLLM,
}
PHASES = ("decode", "prefill")


def resolve(wanted: Any) -> SparseAttention | None:
    """The policies that an option names: None, a `SparseAttention`, or, for answers alone, a policy, its name, or a
    mapping with its name and fields, `{"policy": "quest", "budget": 1024}`. `{"decode": ..., "prefill": ...}` names
    one for each. A mapping may be JSON text.

    Raises:
        ValueError: an unknown name or field, with those that are known, or a value that makes no sense.
    """
    if isinstance(wanted, str) and wanted.lstrip().startswith("{"):
        try:
            wanted = json.loads(wanted)
        except json.JSONDecodeError as error:
            raise ValueError(f"sparse_attention must be JSON if it begins with a brace, but {error}") from error
    if wanted is None or isinstance(wanted, SparseAttention):
        return wanted
    if isinstance(wanted, Mapping) and "policy" not in wanted:
        if not wanted or set(wanted) - set(PHASES):
            raise ValueError(
                f"sparse_attention must have the key policy, or keys among {PHASES}, got {sorted(map(str, wanted))}"
            )
        return SparseAttention(**{phase: _policy(named) for phase, named in wanted.items()})
    return SparseAttention(decode=_policy(wanted))


def _policy(wanted: Any) -> Policy | None:
    if wanted is None or isinstance(wanted, Policy):
        return wanted
    fields = dict(wanted) if isinstance(wanted, Mapping) else {"policy": wanted}
    name = fields.pop("policy", None)
    kind = POLICIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(
            f"sparse_attention must name a policy among {sorted(POLICIES)}, or be one or None, got {wanted!r}"
        )
    known = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(f"sparse_attention {name} must have fields among {sorted(known)}, got {unknown}")
    values: dict[str, Any] = {key: _tuples(value) for key, value in fields.items()}
    return kind(**values)


def _tuples(value: Any) -> Any:
    """JSON's lists as policies have them."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
