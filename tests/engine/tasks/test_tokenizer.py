"""A tokenizer that cannot be used is refused with the file and the key; a text, with the character."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Bpe
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config
from zerokl.engine.tasks.tokenizer import Tokenizer, character_tokenizer

MARKERS = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tokenizer of characters whose vocabulary has two markers, of which one is an added token."""
    characters = pre_tokenizers.ByteLevel.alphabet()
    bpe = Bpe(models.BPE({token: i for i, token in enumerate([*MARKERS, *sorted(characters)])}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=MARKERS[1]).save_pretrained(tmp_path)
    Qwen3Config(vocab_size=300).save_pretrained(tmp_path)
    return tmp_path


def alter(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "config.json",
            {"pad_token_id": [1, 2]},
            r"no usable tokenizer .*; config\.json: pad_token_id is \[1, 2\]",
        ),
        ("config.json", {"num_attention_heads": "x"}, r"; config\.json: num_attention_heads is 'x'"),
        ("tokenizer_config.json", {"eos_token": 5}, r"; tokenizer_config\.json: eos_token is 5"),
        ("tokenizer.json", {"model": 5}, r"; tokenizer\.json\)"),
        (
            "tokenizer_config.json",
            {"additional_special_tokens": MARKERS[:1], "extra_special_tokens": MARKERS[1:]},
            r"lists '<\|im_start\|>' in additional_special_tokens, and the tokenizer splits it into 12",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_tokenizer_that_cannot_be_used_is_refused_with_its_file_and_key(folder, name, fields, message):
    Tokenizer(folder, 300)
    alter(folder / name, **fields)
    with pytest.raises(ValueError, match=message):
        Tokenizer(folder, 300)


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("listed", [MARKERS, {"first": MARKERS[0]}, []], ids=["list", "names", "none"])
def test_one_list_of_markers_is_taken(folder, key, listed):
    alter(folder / "tokenizer_config.json", **{key: listed})
    assert (Tokenizer(folder, 300).encode_plain(MARKERS[0]) == [0]) == bool(listed)


def test_the_character_that_has_no_token_is_named(tmp_path):
    character_tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path, 64)
    for encode in (lambda text: tokenizer.encode(text, chat=False), tokenizer.encode_completion):
        assert len(encode("1+1=")) == 4
        with pytest.raises(ValueError, match=r"does not know: '\\u4e2d' \(U\+4E2D\)"):
            encode("1+中=")
