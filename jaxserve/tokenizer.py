"""Text to token ids and back, and chat templates. Rests on the `tokenizers` package."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.chat_template import ChatTemplate
from jaxserve.exceptions import RequestError, WeightsError
from jaxserve.json_file import read_json

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's special tokens and chat template.

    Args:
      backend: normaliser, pre-tokeniser, model, post-processor and decoder.
      named_tokens: "bos_token", "eos_token", ... -> token; templates see them under these names.
      chat_template: Jinja source, or None for a model without one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
    ):
        self.backend = backend
        self.named_tokens = dict(named_tokens or {})
        self.chat_template = chat_template
        _mark_special(backend, self.named_tokens.values())

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja of a Hugging Face folder.

        Raises:
          WeightsError: no tokenizer.json, or one of the files cannot be read or holds something else than expected.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise WeightsError(
                f"{path} has no tokenizer.json; save the fast tokenizer there, or pass tokenizer= a folder that has it"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises plain Exception
            raise WeightsError(f"{file} is not a readable tokenizer: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        config_file = path / "tokenizer_config.json"
        config = read_json(config_file)
        named = _named_tokens(config_file, config)
        return cls(backend, named_tokens=named, chat_template=_template_source(path, config))

    def save(self, path: Path) -> None:
        """Writes the files that `from_dir` reads into the folder `path`."""
        self.backend.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps(self.named_tokens, indent=2, ensure_ascii=False))
        if self.chat_template is not None:
            (path / "chat_template.jinja").write_text(self.chat_template)

    @property
    def vocab_size(self) -> int:
        """Tokens known to the tokenizer, added ones too; the model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / longest_token tokens."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @functools.cached_property
    def all_special_ids(self) -> list[int]:
        """Ids that `skip_special_tokens` leaves out, ascending."""
        return sorted(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Raises:
          RequestError: the text holds a lone surrogate, which no token stands for.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"the text must be valid Unicode, got a lone surrogate: {error.reason}") from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of `ids`. Some decoders put a space between any two tokens; without
        `spaces_between_special_tokens` runs of special tokens stay together."""
        if skip_special_tokens or spaces_between_special_tokens:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        texts, run = [], []
        special = self._special_set
        for token_id in ids:
            if token_id not in special:
                run.append(token_id)
                continue
            texts += [self.backend.decode(run), self.backend.id_to_token(token_id)]
            run = []
        return "".join(texts) + self.backend.decode(run)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own spelling of each id; None for an id that it does not have."""
        return [self.backend.id_to_token(i) for i in ids]

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        tokenize: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str | list[int]:
        """The conversation as the model was trained to see it: text, or with `tokenize` its ids.

        Args:
          messages: [{"role": "user", "content": "..."}, ...]; a content may be a list of {"type": "text"} parts.
          add_generation_prompt: end with the start of an assistant's message.
          continue_final_message: leave the last message open instead, so that the model goes on with it.
          tools: JSON schemas of functions, for templates that know tools.
          chat_template: Jinja source in place of the model's own.
          kwargs: further variables that the template reads.

        Raises:
          ValueError: no chat template, contradictory flags, or the template refuses the messages.
        """
        template = self._template if chat_template is None else ChatTemplate(chat_template)
        if template is None:
            raise ValueError("this model has no chat template; pass chat_template= or use generate with plain text")
        text = template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(self.named_tokens | kwargs),
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @functools.cached_property
    def pieces(self) -> list[bytes] | None:
        """id -> bytes of its text where each token stands for fixed bytes (byte-level BPE, and SentencePiece's BPE
        with byte fallback), else None. Special tokens are spelled out."""
        to_bytes = _piece_converter(self.backend)
        if to_bytes is None:
            return None
        vocab = self.backend.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(vocab.values(), default=-1) + 1)
        for token, i in vocab.items():
            pieces[i] = to_bytes(token)
        return pieces

    @functools.cached_property
    def texts(self) -> list[str | bytes]:
        """`pieces` as text, but for tokens that hold a part of a character."""
        return [_as_text(piece) for piece in self.pieces or ()]

    @functools.cached_property
    def texts_without_special(self) -> list[str | bytes]:
        """`texts` with nothing for special tokens."""
        texts = list(self.texts)
        for i in self.all_special_ids:
            texts[i] = ""
        return texts

    @functools.cached_property
    def _special_set(self) -> frozenset[int]:
        return frozenset(self.all_special_ids)

    @functools.cached_property
    def _template(self) -> ChatTemplate | None:
        return None if self.chat_template is None else ChatTemplate(self.chat_template)

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def _as_text(piece: bytes) -> str | bytes:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


def _mark_special(backend: tokenizers.Tokenizer, tokens: Any) -> None:
    """Named tokens are special even where tokenizer.json forgot to say so."""
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([t for t in tokens if t not in known and backend.token_to_id(t) is not None])


def _named_tokens(file: Path, config: dict[str, Any]) -> dict[str, str]:
    """Tokens are strings, or objects with the string under "content"."""
    found = {name: config[name] for name in _NAMED_TOKENS if config.get(name)}
    tokens: dict[str, Any] = {
        n: token.get("content") if isinstance(token, dict) else token for n, token in found.items()
    }
    for name, token in tokens.items():
        if not isinstance(token, str):
            raise WeightsError(f"{file}: {name} must be a string or an object with content, got {config[name]!r:.80}")
    return tokens


def _template_source(path: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the field, which may be a list of named templates."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text()
        except UnicodeDecodeError as error:
            raise WeightsError(f"{file} is not text: {error}") from error
    field = config.get("chat_template")
    if isinstance(field, list) and all(isinstance(entry, dict) for entry in field):
        field = next((entry.get("template") for entry in field if entry.get("name") == "default"), None)
    if not isinstance(field, str | None):
        raise WeightsError(
            f"{path / 'tokenizer_config.json'}: chat_template must be a string or a list of objects with name and "
            f"template, got {field!r:.80}"
        )
    return field


def _piece_converter(backend: tokenizers.Tokenizer):
    """token -> bytes for the two decoders that work token by token, else None."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    steps = [step["type"] for step in state["decoders"]] if state["type"] == "Sequence" else [state["type"]]
    if steps == ["ByteLevel"]:
        return _byte_level_bytes
    # The first space that Strip takes away is that of a whole text, not of a continuation.
    if steps in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return _sentencepiece_bytes
    return None


@functools.cache
def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-ins, code point -> byte. Printable bytes stand for themselves, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {b: b for b in printable} | {0x100 + n: b for n, b in enumerate(others)}


@functools.cache
def _alphabet_table() -> dict[int, int | str]:
    """For str.translate: stand-ins become the Latin-1 character of their byte, all else a character beyond Latin-1."""
    alphabet = _byte_alphabet()
    return {c: alphabet.get(c, "\uffff") for c in range(0x144)}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_alphabet_table()).encode("latin-1")
    except UnicodeEncodeError:  # an added token, spelled in plain text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
