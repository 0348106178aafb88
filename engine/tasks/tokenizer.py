"""From text to token ids and back: the tokenizer of a model folder, and the one that `zerokl init` makes."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...files.inputs import check_folder
from ...files.reading import read_json, shown
from .limits import LONGEST_PROMPT, check_template, check_tokenizer
from .tool_calls import ToolCalls, calls_of_message

_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=(),:> .?!'\"_;<[]{}|%"
_SPECIAL = ("<pad>", "<eos>", "<unk>")
# The lists of special tokens in tokenizer_config.json: the name in older versions of transformers, and in
# newer ones.
_MARKERS = ("additional_special_tokens", "extra_special_tokens")


class Tokenizer:
    """The tokenizer of a model folder: it encodes prompts and decodes completions."""

    def __init__(self, folder: Path, vocab_size: int):
        """Raises ValueError when the folder has no usable tokenizer, or one that exceeds `vocab_size`."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if not any((folder / name).exists() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
            raise ValueError(
                f"model: {folder} holds no tokenizer (tokenizer.json, vocab.json or tokenizer.model); copy "
                "the tokenizer's files of the model that it was trained from into it"
            )
        check_folder(folder)
        if (folder / "tokenizer.json").exists():
            check_tokenizer(folder / "tokenizer.json")
        from transformers import AutoTokenizer

        self._folder, self._vocab = folder, vocab_size
        try:
            with _no_panic(folder):
                self._hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare Exception for a file it cannot read
            told = f"{_first_line(error).removesuffix(':')}{_key_of(folder, error)}"
            raise ValueError(f"model: {folder} has no usable tokenizer ({told})") from None
        highest = max(self._hf.get_vocab().values(), default=-1)
        if highest >= vocab_size:
            raise ValueError(
                f"model: the tokenizer of {folder} has token id {highest}, "
                f"the model's vocabulary ends at {vocab_size - 1}"
            )
        self._check_markers(folder / "tokenizer_config.json")
        self.stop_ids = frozenset(self._stop_ids(folder))
        if not self.stop_ids:
            raise ValueError(
                f"model: the tokenizer of {folder} names no end-of-sequence token, so no completion could end"
            )

    def _check_markers(self, path: Path) -> None:
        """Raise ValueError for a special token that the config lists, and that encoding splits.

        transformers takes one of the two lists, so a file with both loses the tokens of the other.
        """
        for key in _MARKERS:
            listed = _fields(path).get(key)
            named = listed.values() if isinstance(listed, dict) else listed
            for marker in named if isinstance(listed, list | dict) else ():
                text = marker.get("content") if isinstance(marker, dict) else marker
                ids = self.encode_plain(text) if isinstance(text, str) else []
                if ids and self._hf.convert_tokens_to_ids(text) not in ids:
                    raise ValueError(
                        f"model: {path} lists {shown(text)} in {key}, and the tokenizer splits it into "
                        f"{len(ids)} tokens; list all special tokens in one of {' and '.join(_MARKERS)}"
                    )

    def _stop_ids(self, folder: Path) -> list[int]:
        """The end-of-sequence ids of the tokenizer and of generation_config.json."""
        ids = [] if self._hf.eos_token_id is None else [self._hf.eos_token_id]
        path = folder / "generation_config.json"
        if path.exists():
            try:
                more = read_json(path).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise ValueError(f"model: {path} is not a JSON object ({error})") from None
            more = more if isinstance(more, list) else [] if more is None else [more]
            if not all(type(i) is int for i in more):
                raise ValueError(
                    f"model: {path}: eos_token_id ({shown(more)}) must be a token id, or a list of them"
                )
            ids += more
        return ids

    def encode(self, prompt: str, chat: bool, system: str = "") -> list[int]:
        """Token ids of a prompt.

        chat: the prompt is a user's turn of the chat template, if the tokenizer has one. system: the turn
        before it. Raises ValueError for an empty prompt, for one that is longer than any context, for a
        character that the tokenizer does not know, for a system prompt without a chat template that takes
        one, and for a template that fails.
        """
        if len(prompt) > LONGEST_PROMPT:
            raise ValueError(f"prompt {shown(prompt)} must have at most {LONGEST_PROMPT:,}")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ValueError(f"prompt {shown(prompt)} is not valid Unicode") from None
        text = prompt
        if chat and self._hf.chat_template:
            text = self._chat_text(prompt, system)
            ids = self.encode_plain(text)
        elif system:
            raise ValueError(
                f"the system prompt {shown(system)} needs chat, and a tokenizer with a chat template; "
                "put its words into the prompt"
            )
        else:
            ids = self._encode(prompt, add_special_tokens=True)
        if not ids:
            raise ValueError(f"prompt {shown(prompt)} has no tokens")
        if self._has_unknown(ids):
            raise ValueError(f"prompt {shown(prompt)} {self._unknown(text)}")
        return ids

    def _has_unknown(self, ids: Sequence[int]) -> bool:
        return self._hf.unk_token_id is not None and self._hf.unk_token_id in ids

    def _unknown(self, text: str) -> str:
        """What is wrong with a text that has a character without a token, and which character it is."""
        bad = next((c for c in dict.fromkeys(text) if self._has_unknown(self.encode_plain(c))), "")
        which = f": {bad!a} (U+{ord(bad):04X})" if bad else ""
        return f"has a character that the tokenizer does not know{which}"

    def _chat_text(self, prompt: str, system: str) -> str:
        """A user's turn in the chat template. Raises ValueError where the template fails."""
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": prompt})
        return self._rendered(turns, None, " with a system prompt" if system else "")

    @property
    def has_chat_template(self) -> bool:
        """Whether there is one."""
        return bool(self._hf.chat_template)

    @property
    def bos(self) -> str:
        """The token that begins texts, by its name; empty where there is none."""
        return self._hf.bos_token or ""

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """What the chat template makes of messages, up to where the model's turn begins.

        tools: JSON schemas for the template. Raises ValueError where the template fails.
        """
        return self._rendered(messages, tools, "")

    def conversation(self, messages: Sequence[dict[str, Any]], opening: bool) -> str:
        """As render; opening: whether the beginning of the model's turn follows. Raises as render does."""
        return self._rendered(messages, None, "", opening)

    def _rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
        where: str,
        opening: bool = True,
    ) -> str:
        """The text that `render` returns. where: what the error adds to "fails"."""
        source = f"the chat template of {self._folder}"
        if isinstance(self._hf.chat_template, str):
            check_template(self._hf.chat_template, source)
        try:
            return self._hf.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=opening, tokenize=False
            )
        except Exception as error:  # a template can raise anything
            raise ValueError(f"model: {source} fails{where} ({_first_line(error)})") from None

    @property
    def has_response_template(self) -> bool:
        """Whether the tokenizer says how a turn of its model is read."""
        return getattr(self._hf, "response_template", None) is not None

    def tool_calls(self, before: Sequence[int], ids: Sequence[int], tools: Sequence[Any] | None) -> ToolCalls:
        """The calls in a turn, as the tokenizer's response template reads it (transformers' parse_response).

        before: the ids before the turn, which may have begun it. ids: of the turn, the stop token included.
        """
        texts = [self.text(part) for part in (ids, before)]
        try:
            message = self._hf.parse_response(texts[0], prefix=texts[1], tools=list(tools or ()) or None)
        except Exception as error:  # a template can raise anything
            return ToolCalls(error=f"cannot be read by the response template ({_first_line(error)})")
        return calls_of_message(message)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text, with nothing added before or after it."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with _no_panic(self._folder):
            return self._hf.encode(text, add_special_tokens=add_special_tokens)

    def encode_completion(self, text: str) -> list[int]:
        """The ids of a given completion. Raises ValueError for a text that has none, or no valid ones."""
        try:
            ids = self.encode_plain(text)
        except UnicodeEncodeError:
            raise ValueError(f"completion {shown(text)} is not valid Unicode") from None
        if not ids:
            raise ValueError(f"completion {shown(text)} has no tokens")
        if self._has_unknown(ids):
            raise ValueError(f"completion {shown(text)} {self._unknown(text)}")
        return self.checked(ids)

    @property
    def stop_id(self) -> int:
        """The token that ends a given completion: the tokenizer's own end token, or the least of stop_ids."""
        end_id = self._hf.eos_token_id
        return min(self.stop_ids) if end_id is None else end_id

    def checked(self, ids: Sequence[int]) -> list[int]:
        """The ids, if the tokenizer has all of them. Raises ValueError."""
        wrong = next((i for i in ids if not 0 <= i < self._vocab), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is none of the model's, which are 0 to {self._vocab - 1}")
        if self._has_unknown(ids):
            raise ValueError(f"{shown(self.text(ids))} has a character that the tokenizer does not know")
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens.

        It is for rewards and reports only. Training sees the ids.
        """
        return self._decode(ids, skip_special_tokens=True)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        with _no_panic(self._folder):
            return self._hf.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, special tokens by their names. For people to look at only."""
        return [self.text([i]) for i in ids]

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens by their names."""
        return self._decode(ids, skip_special_tokens=False)

    def round_trip(self, ids: Sequence[int]) -> list[int]:
        """The ids of the text of ids: what a program reads that decodes and encodes again."""
        return self.encode_plain(self.text(ids))

    @property
    def special_ids(self) -> list[int]:
        """The tokens that begin and end texts, and the padding."""
        named = (self._hf.bos_token_id, self._hf.eos_token_id, self._hf.pad_token_id)
        return [*dict.fromkeys(i for i in (*named, *sorted(self.stop_ids)) if i is not None)]

    @property
    def padding_ids(self) -> list[int]:
        """What a batch may be padded with: the padding token, the end token, and 0."""
        named = (self._hf.pad_token_id, self._hf.eos_token_id, 0)
        return [*dict.fromkeys(i for i in named if i is not None)]

    def encode_answer(self, text: str) -> list[int]:
        """The ids of a given completion that is whole: its stop token ends them. Raises ValueError."""
        return [*self.encode_completion(text), self.stop_id]

    def grouped_texts(self, completions: Sequence[Sequence[int]], n: int) -> list[list[str]]:
        """The texts of completions (see `decode`), n of each prompt."""
        texts = [self.decode(ids) for ids in completions]
        return [texts[i : i + n] for i in range(0, len(texts), n)]


@contextmanager
def _no_panic(folder: Path) -> Iterator[None]:
    """Raise ValueError in place of a panic of the tokenizers library, which `except Exception` lets pass.

    pyo3 makes the panic's class when it is first raised, and no module has it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        path = folder / "tokenizer.json"
        raise ValueError(f"model: the tokenizers library panics with {path} ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    """The kind of an error, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _fields(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; empty where there is no such file, or it holds something else."""
    try:
        fields = read_json(path)
    except (OSError, ValueError):
        return {}  # whoever needs the file says what is wrong with it
    return fields if isinstance(fields, dict) else {}


def _key_of(folder: Path, error: Exception) -> str:
    """The file and the key that an error of transformers speaks of, as the end of a line; or empty."""
    if type(error) is Exception:  # so raises the tokenizers library, which reads one file
        return "; tokenizer.json"
    words = set(re.findall(r"\w+", str(error)))
    for name in ("config.json", "tokenizer_config.json"):
        for key, value in _fields(folder / name).items():
            if key in words:
                return f"; {name}: {key} is {shown(value)}"
    return ""


def character_tokenizer(characters: str = _CHARACTERS) -> Any:
    """A PreTrainedTokenizerFast of transformers with a token for each character.

    Three special tokens come first. With the default characters, it has 64 tokens.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as WordTokenizer
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate((*_SPECIAL, *characters))}
    tokenizer = WordTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
