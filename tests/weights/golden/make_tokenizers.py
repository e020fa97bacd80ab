"""Makes tokenizers.json: what other implementations make of the texts below.

Run in an environment with transformers and sentencepiece: `python make_tokenizers.py path/to/SmolLM2.gguf`.
* "demo": ids and chat texts of the demo model, by transformers from the same GGUF. Its reader of GGUF does not know
  that this tokenizer splits off every numeral, which shows for ones such as ½: they are left out here.
* "sentencepiece": a small vocabulary trained here, with ids by sentencepiece itself.
"""

import io
import json
import sys
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer

TEXTS = [
    "",
    " ",
    "Hello",
    "Hello, world!",
    " leading and trailing ",
    "two  spaces   three\t\ttabs\n\n\nlines\r\nend\n",
    "I'm you're he's we'll they'd I've don't CAN'T",
    "0 1 12 123 1234 3.14159 1,000,000 2024-02-29 0x1F",
    "naïve café Über straße ÅÄÖ",
    "日本語のテキスト。한국어 텍스트, 中文文本",
    "Привет, мир! Γειά σου Κόσμε",
    "مرحبا بالعالم שלום עולם",
    "emoji 😀👍🏽👨‍👩‍👧‍👦🇫🇮 end",
    "e\u0301 combining, \u00a0 nbsp, \u200b zero width, \ufeff bom",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n\n\nclass A:\n\tpass\n",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 42); return 0; }',
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\u00e9"}}',
    "https://example.com/path?query=1&other=two#fragment user@example.org",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more<|im_end|>  <|im_start|>",
    "<|im_start|><|im_start|> <repo_name>a<file_sep>b",
    "$\\int_0^1 x^2\\,dx = \\frac{1}{3}$ — “quotes” …",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "a" * 3 + "\u0000\u0001\u007f" + "z",
    "The quick brown fox jumps over the lazy dog. " * 3,
]
CHATS = [
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! "},
        {"role": "user", "content": ' <b>& "quotes"</b> é'},
    ],
]


def demo(gguf: Path) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    render = tokenizer.apply_chat_template
    open_end = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    return {
        "ids": [tokenizer.encode(text) for text in TEXTS],
        "decoded": [tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) for text in TEXTS],
        "chats": [render(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS],
        "chats_closed": [render(chat, tokenize=False, add_generation_prompt=False) for chat in CHATS],
        "open_end": {
            "messages": open_end,
            "text": render(open_end, tokenize=False, add_generation_prompt=False, continue_final_message=True),
        },
    }


def small_sentencepiece(corpus: str) -> dict:
    """A vocabulary of 700 pieces; types are GGUF's, which are sentencepiece's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.splitlines()),
        model_writer=model,
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        user_defined_symbols=["<start_of_turn>"],
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())
    kinds = [processor.is_unknown, processor.is_control, processor.is_byte]
    names = dict(zip(kinds, (2, 3, 6), strict=True))
    types = [next((names[kind] for kind in kinds if kind(i)), 1) for i in ids]
    types[processor.piece_to_id("<start_of_turn>")] = 4
    texts = [text for text in TEXTS if text]
    return {
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "types": types,
        "texts": texts,
        "ids": [[processor.bos_id(), *processor.encode(text)] for text in texts],
    }


def main() -> None:
    here = Path(__file__).parent
    corpus = "\n".join(TEXTS) + "\n" + Path(__file__).read_text()
    golden = {
        "texts": TEXTS,
        "chat_messages": CHATS,
        "demo": demo(Path(sys.argv[1])),
        "sentencepiece": small_sentencepiece(corpus),
    }
    (here / "tokenizers.json").write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
