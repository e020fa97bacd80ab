"""Log probabilities of sampled tokens in OpenAI's two forms."""

from jaxserve.outputs import CompletionOutput, Logprob
from jaxserve.server.protocol import ChatLogprobs, CompletionLogprobs, PositionLogprobs, TokenLogprob
from jaxserve.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no minus infinity


def of_completion(sample: CompletionOutput, first_offset: int) -> CompletionLogprobs:
    """`first_offset`: characters of the tokens before these."""
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    offset = first_offset
    for token_id, candidates in zip(sample.token_ids, sample.logprobs or (), strict=True):
        token = _text(token_id, candidates[token_id])
        result.tokens.append(token)
        result.token_logprobs.append(_finite(candidates[token_id]))
        result.top_logprobs.append({_text(i, candidate): _finite(candidate) for i, candidate in candidates.items()})
        result.text_offset.append(offset)
        offset += len(token)
    return result


def of_chat(sample: CompletionOutput, num_top: int, tokenizer: Tokenizer) -> ChatLogprobs:
    """`num_top`: likeliest tokens to name at each place."""

    def entry(token_id: int, candidate: Logprob) -> TokenLogprob:
        token, logprob = _text(token_id, candidate), _finite(candidate)
        return TokenLogprob(token=token, logprob=logprob, bytes=_bytes(token_id, token, tokenizer))

    content = []
    for token_id, candidates in zip(sample.token_ids, sample.logprobs or (), strict=True):
        taken = entry(token_id, candidates[token_id])
        top = [entry(i, candidate) for i, candidate in candidates.items() if candidate.rank <= num_top]
        content.append(PositionLogprobs(token=taken.token, logprob=taken.logprob, bytes=taken.bytes, top_logprobs=top))
    return ChatLogprobs(content=content)


def _text(token_id: int, candidate: Logprob) -> str:
    return f"token_id:{token_id}" if candidate.decoded_token is None else candidate.decoded_token


def _bytes(token_id: int, token: str, tokenizer: Tokenizer) -> list[int]:
    pieces = tokenizer.pieces
    return list(token.encode() if pieces is None or token_id >= len(pieces) else pieces[token_id])


def _finite(candidate: Logprob) -> float:
    return max(candidate.logprob, LOWEST)
