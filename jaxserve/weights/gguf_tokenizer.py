"""A tokenizer from the `tokenizer.*` metadata of a GGUF file.

Model "gpt2" is byte-level BPE with explicit merges; "llama" is SentencePiece's BPE, whose merges follow from the
pieces' scores. What splits text before BPE is only named (`tokenizer.ggml.pre`), so the splits are spelled out here.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from jaxserve.exceptions import WeightsError
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights.gguf_file import checked

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type; 1 is normal, 5 unused, 6 a byte

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_GPT2_SPLITS = ("gpt-2", "default")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")  # every digit alone, then GPT-2's split
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word in the vocabulary needs no merges
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "tekken")


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describes, with special tokens, BOS/EOS rule and chat template.

    Raises:
      WeightsError: no tokenizer in the file, or a kind that is not supported.
    """
    kind = checked(metadata, "tokenizer.ggml.model", "a string")
    tokens = checked(metadata, "tokenizer.ggml.tokens", "a list of strings")
    if kind is None or tokens is None:
        raise WeightsError("the GGUF file has no tokenizer (tokenizer.ggml.model and .tokens); pass tokenizer=")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise WeightsError(f"tokenizer.ggml.model must be gpt2 or llama, got {kind!r}; pass tokenizer= a folder")
    _add_tokens(backend, metadata, tokens)
    named = _named_tokens(metadata, tokens)
    _add_frame(backend, metadata, named)
    template = checked(metadata, "tokenizer.chat_template", "a string")
    return Tokenizer(backend, named_tokens=named, chat_template=template)


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Backend:
    pre = checked(metadata, "tokenizer.ggml.pre", "a string", "default")
    lines = checked(metadata, "tokenizer.ggml.merges", "a list of strings", ())
    merges = [tuple(merge.split(" ")) for merge in lines]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        backend = Backend(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    except Exception as error:  # the package raises plain Exception
        message = f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({error!s:.200}); download the file again"
        raise WeightsError(message) from error
    backend.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2_SPLITS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _SINGLE_DIGITS:
        first, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
    elif pre in _SPLITS:
        first = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        known = ", ".join(sorted({*_GPT2_SPLITS, *_SINGLE_DIGITS, *_SPLITS}))
        raise WeightsError(f"tokenizer.ggml.pre must be one of {known}, got {pre!r}; pass tokenizer= a folder")
    return pre_tokenizers.Sequence([first, byte_level])


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Backend:
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = checked(metadata, "tokenizer.ggml.scores", "a list of numbers", ())
    if len(scores) != len(tokens):
        raise WeightsError(f"tokenizer.ggml.scores must have one for each of {len(tokens)} tokens, got {len(scores)}")
    unknown_id = checked(metadata, "tokenizer.ggml.unknown_token_id", "an integer", 0)
    if not 0 <= unknown_id < len(tokens):
        raise WeightsError(f"tokenizer.ggml.unknown_token_id must be in [0, {len(tokens)}), got {unknown_id}")
    merges, unknown = _merges_by_score(vocab, scores), tokens[unknown_id]
    backend = Backend(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    steps: list = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if checked(metadata, "tokenizer.ggml.add_space_prefix", "a boolean", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose union scores best: every split of every piece, best score first."""
    merges = []
    for piece, i in vocab.items():
        splits = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
        ranked = [(vocab[a], vocab[b], a, b) for a, b in splits if a in vocab and b in vocab]
        merges += [(-scores[i], i, *split) for split in sorted(ranked)]
    merges.sort(key=lambda merge: merge[0])  # stable: equal scores stay in the order of ids
    return [(a, b) for *_, a, b in merges]


def _add_tokens(backend: Backend, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Control tokens are special, user-defined ones are matched before BPE but printed."""
    types = checked(metadata, "tokenizer.ggml.token_type", "a list of integers", ())
    kinds = list(zip(tokens, types, strict=False))
    special = [token for token, type_ in kinds if type_ in (_UNKNOWN, _CONTROL)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    plain = [token for token, type_ in kinds if type_ == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _named_tokens(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: checked(metadata, f"tokenizer.ggml.{key}_token_id", "an integer") for key, name in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def _add_frame(backend: Backend, metadata: dict[str, Any], named: dict[str, str]) -> None:
    """BOS before and EOS after every text, where the file asks for them."""
    pre = metadata.get("tokenizer.ggml.pre")
    bos_default = metadata["tokenizer.ggml.model"] == "llama" or pre in _BOS_BY_DEFAULT
    bos = (
        named.get("bos_token") if checked(metadata, "tokenizer.ggml.add_bos_token", "a boolean", bos_default) else None
    )
    eos = named.get("eos_token") if checked(metadata, "tokenizer.ggml.add_eos_token", "a boolean", False) else None
    frame = [token for token in (bos, eos) if token is not None]
    if frame:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(part for part in (bos, "$A", eos) if part is not None),
            special_tokens=[(token, backend.token_to_id(token)) for token in frame],
        )
