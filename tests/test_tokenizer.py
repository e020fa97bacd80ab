"""The tokenizer against transformers and sentencepiece (weights/golden), from both kinds of files; chat templates."""

import json
import re
from pathlib import Path

import pytest
import tokenizers

from jaxserve.exceptions import WeightsError
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights.demo import demo_gguf
from jaxserve.weights.gguf_file import GGUFFile
from jaxserve.weights.gguf_tokenizer import tokenizer_from_gguf

GOLDEN = json.loads((Path(__file__).parent / "weights" / "golden" / "tokenizers.json").read_text())
TEXTS, DEMO, PIECES = GOLDEN["texts"], GOLDEN["demo"], GOLDEN["sentencepiece"]
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def demo():
    return tokenizer_from_gguf(GGUFFile(demo_gguf()).metadata)


def byte_level_metadata(pre, **more):
    """A vocabulary of the 256 bytes, a merge, a word without merges, and two control tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "12", "Ġcat", "<s>", "</s>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3, 3],
        "tokenizer.ggml.merges": ["1 2"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 259,
        **more,
    }


def sentencepiece_metadata(**more):
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES["tokens"],
        "tokenizer.ggml.scores": PIECES["scores"],
        "tokenizer.ggml.token_type": PIECES["types"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


@pytest.mark.parametrize("i", range(len(TEXTS)))
def test_the_demo_models_ids_are_those_of_transformers(i, demo):
    assert demo.encode(TEXTS[i]) == DEMO["ids"][i]
    assert demo.decode(DEMO["ids"][i]) == DEMO["decoded"][i]


def test_encode_gives_a_list_of_ids_and_decode_the_text(demo):
    text = "naïve 日本 <|im_end|> 😀"
    ids = demo.encode(text)
    assert type(ids) is list
    assert all(type(i) is int for i in ids)
    assert demo.decode(ids, skip_special_tokens=False) == text
    assert demo.decode(ids) == "naïve 日本  😀"


def test_every_numeral_of_the_demo_model_stands_alone(demo):
    assert [demo.decode([i]) for i in demo.encode("x 2024½")] == ["x", " ", "2", "0", "2", "4", "½"]


def test_pieces_are_the_bytes_of_each_token(demo):
    for text in TEXTS:
        assert b"".join(demo.pieces[i] for i in demo.encode(text)) == text.encode()


def test_special_tokens_of_the_demo_model(demo):
    assert (demo.vocab_size, demo.bos_token_id, demo.eos_token_id) == (49152, 1, 2)
    assert demo.all_special_ids == list(range(17))
    assert demo.convert_ids_to_tokens([1, 2, 99999]) == ["<|im_start|>", "<|im_end|>", None]


@pytest.mark.parametrize("i", range(len(PIECES["texts"])))
def test_merges_from_scores_give_sentencepieces_ids(i):
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    assert tokenizer.encode(PIECES["texts"][i]) == PIECES["ids"][i]
    assert tokenizer.decode(PIECES["ids"][i]) == PIECES["texts"][i].replace("<start_of_turn>", "")


def test_without_a_space_prefix():
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = tokenizer_from_gguf(metadata)
    plain, prefixed = (
        t.encode("Hello", add_special_tokens=False) for t in (tokenizer, tokenizer_from_gguf(sentencepiece_metadata()))
    )
    assert plain != prefixed
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"


def test_user_defined_tokens_are_matched_first_and_printed():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    marker = tokenizer.token_to_id("<start_of_turn>")
    assert marker in tokenizer.encode("a<start_of_turn>b")
    assert marker not in tokenizer.all_special_ids
    assert "<start_of_turn>" in tokenizer.decode([marker])


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12", "3", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["12", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
    ],
)
def test_digits_are_split_as_the_pre_tokenizer_says(pre, expected):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234", add_special_tokens=False)) == expected


def test_llama_3_takes_whole_words_and_begins_with_bos():
    ids = tokenizer_from_gguf(byte_level_metadata("llama-bpe")).encode("a cat")
    assert ids[0] == 258
    assert ids[-1] == 257
    assert len(tokenizer_from_gguf(byte_level_metadata("gpt-2")).encode("a cat")) == 5  # no merge leads to the word


def test_bos_and_eos_are_added_when_the_file_says_so():
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = tokenizer_from_gguf(byte_level_metadata("gpt-2", **flags))
    assert tokenizer.encode("12") == [258, 256, 259]
    assert tokenizer.encode("12", add_special_tokens=False) == [256]


def test_an_unknown_pre_tokenizer_lists_the_known():
    with pytest.raises(WeightsError, match=r"must be one of .*llama-bpe.*smollm.*, got 'martian'; pass tokenizer="):
        tokenizer_from_gguf(byte_level_metadata("martian"))


def test_an_unknown_model_kind():
    with pytest.raises(WeightsError, match=r"tokenizer.ggml.model must be gpt2 or llama, got 't5'"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": []})


def test_a_gguf_without_tokenizer():
    with pytest.raises(WeightsError, match="has no tokenizer"):
        tokenizer_from_gguf({})


def test_a_saved_tokenizer_reads_back_the_same(demo, tmp_path):
    demo.save(tmp_path)
    again = Tokenizer.from_dir(tmp_path)
    assert [again.encode(text) for text in TEXTS] == DEMO["ids"]
    assert (again.named_tokens, again.chat_template) == (demo.named_tokens, demo.chat_template)
    assert again.all_special_ids == demo.all_special_ids


def test_a_folder_gives_its_special_tokens_and_template(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<e>": 1, "<b>": 2}, [])).save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<b>"},
        "eos_token": "<e>",
        "pad_token": None,
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}!"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 1)
    assert tokenizer.all_special_ids == [1, 2]
    assert tokenizer.apply_chat_template(USER) == "<e>!"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_dir(tmp_path).apply_chat_template(USER) == "from the file"


def test_a_tokenizer_json_that_is_damaged(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError, match="is not a readable tokenizer"):
        Tokenizer.from_dir(tmp_path)


def test_special_tokens_stay_together_without_spaces_between():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<x>": 1, "<y>": 2}, "a"))
    backend.add_special_tokens(["<x>", "<y>"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=False) == "<x> <y> a"
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=False, spaces_between_special_tokens=False) == "<x><y>a"


@pytest.mark.parametrize("i", range(len(GOLDEN["chat_messages"])))
def test_chats_of_the_demo_model_are_those_of_transformers(i, demo):
    messages = GOLDEN["chat_messages"][i]
    assert demo.apply_chat_template(messages) == DEMO["chats"][i]
    assert demo.apply_chat_template(messages, add_generation_prompt=False) == DEMO["chats_closed"][i]
    ids = demo.apply_chat_template(messages, tokenize=True)
    assert demo.decode(ids, skip_special_tokens=False) == DEMO["chats"][i]


def test_the_last_message_can_be_continued(demo):
    go_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert demo.apply_chat_template(DEMO["open_end"]["messages"], **go_on) == DEMO["open_end"]["text"]
    trimming = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert (
        demo.apply_chat_template([{"role": "user", "content": "Well, "}], chat_template=trimming, **go_on) == "[Well,"
    )


def test_what_templates_rely_on(demo):
    template = (
        "{% for m in messages %}\n"
        "{% if loop.first %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{{ tools[0] | tojson(indent=1) }}\n"
        "{% endfor %}{{ bos_token }}{{ extra }}{{ strftime_now('%Y') }}"
    )
    text = demo.apply_chat_template(
        [*USER, {"role": "user", "content": "<é&'>"}], chat_template=template, tools=[{"a": 1}], extra=7
    )
    assert re.fullmatch(r"""\{"role": "user", "content": "<é&'>"\}\{\n "a": 1\n\}\n<\|im_start\|>7\d{4}""", text)


def test_text_parts_are_joined(demo):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in demo.apply_chat_template([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "messages must hold at least one message"),
        (["Hi"], {}, "a message must be a dict like"),
        ([{"content": "Hi"}], {}, "a message must be a dict like"),
        ([{"role": "user", "content": 3}], {}, "content must be a string or a list of text parts, got 3"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "a content part must be"),
        (USER, {"continue_final_message": True}, "add_generation_prompt starts a new message"),
        (USER, {"chat_template": "{% if %}"}, "not valid Jinja, line 1"),
        (USER, {"chat_template": "{{ raise_exception('roles must alternate') }}"}, "refuses .*: roles must alternate"),
        (USER, {"chat_template": "{{ messages.append(1) }}"}, "the chat template refuses"),  # the sandbox
        (USER, {"chat_template": "{{ ''.__class__.__mro__ }}"}, "the chat template refuses"),
        (USER, {"tools": [print]}, "a tool must be a dict"),
        (
            USER,
            {"chat_template": "x", "add_generation_prompt": False, "continue_final_message": True},
            "does not print the content",
        ),
    ],
)
def test_bad_chats_are_refused(messages, options, message, demo):
    with pytest.raises(ValueError, match=message):
        demo.apply_chat_template(messages, **options)


def test_a_model_without_template():
    with pytest.raises(ValueError, match="this model has no chat template; pass chat_template="):
        tokenizer_from_gguf(byte_level_metadata("gpt-2")).apply_chat_template(USER)
