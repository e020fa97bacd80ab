"""Token ids of one sequence into text that may be streamed.

Where every token stands for fixed bytes (`Tokenizer.pieces`), a token costs a table look-up; bytes that do not yet make
a character wait for the next token. Other decoders need context, and decode a short window of tokens each time.

Stop strings are looked for in what each token adds. The last characters, which could still become one, are held back.
"""

import codecs
import re
from collections.abc import Sequence

from jaxserve.tokenizer import Tokenizer

_CONTEXT_TOKENS = 6  # of the prompt: enough for a character of four single bytes
_MAX_WINDOW = 16  # tokens that may wait for a character; more are broken text, which is let through


class IncrementalDetokenizer:
    """The text of a growing sequence; what a token costs does not depend on the length.

    Args:
      prompt_token_ids: what went before; a character that begins there ends in the text.
      stop: strings that end the text where the first of them begins.
      include_stop: keep the stop string in the text.
      min_tokens: a stop string counts only if it ends in a later token than this many.

    `num_tokens` counts the tokens taken, up to the one that completes a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        if tokenizer.pieces is None:
            decoder = _WindowDecoder(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
        else:
            decoder = _PieceDecoder(tokenizer, prompt_token_ids, skip_special_tokens)
        self._decode = decoder.decode
        self._stop, self._include_stop, self._min_tokens = tuple(stop), include_stop, min_tokens
        self._pattern = re.compile("|".join(map(re.escape, stop))) if stop else None  # is there any? almost always not
        self._hold = max(map(len, self._stop), default=1) - 1  # characters
        self._text = ""  # that may be streamed
        self._fresh: list[str] = []  # belongs to _text, not yet joined
        self._tail = ""  # the last _hold characters of all; held back unless stop strings are kept
        self._stopped_by: str | None = None
        self.num_tokens = 0

    def append(self, new_ids: Sequence[int]) -> str | None:
        """Takes further tokens; returns the stop string that they complete, and drops what comes after it."""
        for token_id in new_ids:
            if self._stopped_by is not None:
                break
            self.num_tokens += 1
            text = self._decode(token_id)
            if self._pattern is None:
                self._fresh.append(text)
            elif text:
                self._watch(text, self._pattern)
        return self._stopped_by

    def text_ready(self, finished: bool) -> str:
        """All text so far that may be shown; with `finished`, to the end, without a character that never completed."""
        if finished and not self._include_stop:
            self._fresh.append(self._tail)
            self._tail = ""
        if self._fresh:
            text, self._text = self._text, ""  # the only reference: CPython then appends in place
            text += "".join(self._fresh)
            self._text = text
            self._fresh.clear()
        return self._text

    def _watch(self, text: str, pattern: re.Pattern) -> None:
        """Releases what cannot be part of a stop string any more, or all before (or with) a stop string found."""
        window, seen = self._tail + text, len(self._tail)
        if pattern.search(window) and self.num_tokens > self._min_tokens and (found := self._find(window, seen)):
            start, self._stopped_by = found
            end = start + len(self._stopped_by)
            self._fresh.append(window[seen:end] if self._include_stop else window[:start])
            self._tail = ""
            return
        cut = max(len(window) - self._hold, 0)
        self._fresh.append(text if self._include_stop else window[:cut])
        self._tail = window[cut:]

    def _find(self, window: str, seen: int) -> tuple[int, str] | None:
        """The leftmost stop string that ends beyond the `seen` characters; of two that begin there the shorter."""
        best = None
        for stop in self._stop:
            start = window.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start, len(stop)) < (best[0], len(best[1]))):
                best = (start, stop)
        return best


class _PieceDecoder:
    """Tokens that are fixed bytes: looked up, and joined across tokens only where a character is cut."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool):
        self._texts = tokenizer.texts_without_special if skip_special_tokens else tokenizer.texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False  # bytes wait in _utf8
        for token_id in prompt_token_ids[-_CONTEXT_TOKENS:]:
            self.decode(token_id)

    def decode(self, token_id: int) -> str:
        """The text that the token completes."""
        try:
            piece = self._texts[token_id]
        except IndexError:  # a model's vocabulary may be padded beyond the tokenizer's
            piece = ""
        if isinstance(piece, str):
            if not self._pending:
                return piece
            piece = piece.encode()
        text = self._utf8.decode(piece)
        self._pending = bool(self._utf8.getstate()[0])
        return text


class _WindowDecoder:
    """Tokens whose text depends on their neighbours: what they add to the decoding of the few tokens before them."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special: bool, spaces: bool):
        self._decode = lambda ids: tokenizer.decode(ids, skip_special, spaces)
        self._ids = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._read = len(self._ids)  # tokens of the window whose text is out
        self._shown = self._decode(self._ids).rstrip("\ufffd")  # a character that the prompt begins

    def decode(self, token_id: int) -> str:
        """The text that the token completes."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._shown) or (text.endswith("\ufffd") and len(self._ids) < _MAX_WINDOW):
            return ""
        new = text[len(self._shown) :]
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return new
