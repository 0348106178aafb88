"""From an environment's contents to the ids that stand before a turn.

Nothing that was drawn is decoded and encoded again. The chat template is applied to the first messages of a
trajectory. Each later content appends ids: those of what the template writes between the model's turn and its
next one. They are found by rendering the conversation with a placeholder for each of the model's turns.

This is what the template itself would give only where it never writes an earlier turn in another way, once a
later one follows. `Renderer` checks that at its start, with a turn that has thoughts, before an answer of
another role than it has checked, and at each turn again.
With mode = "append" the ids between two turns are those of a conversation of these two turns alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...files.reading import shown
from .environment import Content
from .tokenizer import Tokenizer

# Stands for a turn of the model. No template changes or strips it.
_PLACEHOLDER = "zerokl{}turn"
_THOUGHTS = "<think>\nzeroklthoughts\n</think>\n\n"


@dataclass
class Transcript:
    """What the template has been given of a trajectory, and the text that it made of that."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""


class Renderer:
    """The ids of an environment's contents, in the chat template of a tokenizer, or as plain text.

    chat: texts go through the template, if the tokenizer has one. mode: "template", or "append" (see the
    head of this file). tools: JSON schemas that the template names, if there are any.

    Raises ValueError in the mode "template" for a template that writes an earlier turn in another way.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat: bool, mode: str = "template", tools: Sequence[Any] | None = None
    ):
        self._tokenizer, self._mode, self._tools = tokenizer, mode, list(tools) if tools else None
        self._chat = chat and tokenizer.has_chat_template
        if self._tools and not self._chat:
            raise ValueError("environment: its tools need chat, and a tokenizer with a chat template")
        # The roles after a turn of the model with which the template keeps it; None, or why it does not.
        self._refusals: dict[str, str | None] = {}
        if self._chat and mode == "template":
            self._check_template("tool" if self._tools else "user")

    def begin(self, content: Content) -> tuple[Transcript, list[int]]:
        """The ids of a trajectory's first content, its prompt. Raises ValueError."""
        transcript = Transcript()
        if is_ids(content):
            return transcript, self._tokenizer.checked(content)
        if not self._chat:
            return transcript, self._tokenizer.encode(_plain(content), chat=False)
        transcript.messages = _messages(content)
        transcript.text = self._render(transcript.messages)
        return transcript, self._tokenizer.checked(self._tokenizer.encode_plain(transcript.text))

    def follow(self, transcript: Transcript, content: Content, turn: int, last_id: int) -> list[int]:
        """The ids of a content after the model's turn number `turn`, which ended with the token `last_id`.

        The template's end of a turn is left out where the model drew it. Raises ValueError for a template
        that writes an earlier turn in another way.
        """
        if is_ids(content):
            return self._tokenizer.checked(content)
        if not self._chat:
            return self._tokenizer.checked(self._tokenizer.encode_plain(_plain(content)))
        answers = _messages(content)
        if self._mode == "template" and answers:
            self._check_template(answers[0]["role"])
        if self._mode == "append" or not transcript.messages:
            text = self._after([{"role": "user", "content": "-"}], answers)
        else:
            text = self._continued(transcript, answers, turn)
        ids = self._tokenizer.checked(self._tokenizer.encode_plain(text))
        return ids[1:] if ids and ids[0] == last_id else ids

    def _after(self, before: list[dict[str, Any]], answers: list[dict[str, Any]]) -> str:
        """What follows a turn of the model after the messages `before`."""
        placeholder = _PLACEHOLDER.format(0)
        text = self._render([*before, {"role": "assistant", "content": placeholder}, *answers])
        return text[text.rindex(placeholder) + len(placeholder) :]

    def _continued(self, transcript: Transcript, answers: list[dict[str, Any]], turn: int) -> str:
        """What the template writes after the text so far and the model's turn. Notes both."""
        placeholder = _PLACEHOLDER.format(turn)
        messages = [*transcript.messages, {"role": "assistant", "content": placeholder}, *answers]
        text, before = self._render(messages), transcript.text + placeholder
        if not text.startswith(before):
            raise ValueError(_rewritten(transcript.text, text, turn))
        transcript.messages, transcript.text = messages, text
        return text[len(before) :]

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self._tokenizer.render(messages, self._tools)

    def _check_template(self, role: str) -> None:
        """Raise ValueError for a template that does not keep a turn when a message of `role` follows.

        Qwen3's keeps the thoughts of a turn that a tool answers, and drops them once a user does.
        """
        if role not in self._refusals:
            self._refusals[role] = self._refusal_of(role)
        if (refusal := self._refusals[role]) is not None:
            raise ValueError(refusal)

    def _refusal_of(self, role: str) -> str | None:
        placeholders = [_PLACEHOLDER.format(i) for i in (1, 2)]
        messages = [{"role": "user", "content": "-"}]
        before, bos = self._render(messages), self._tokenizer.bos
        for i, placeholder in enumerate(placeholders, 1):
            turn = {"role": "assistant", "content": _THOUGHTS + placeholder}
            messages += [turn, {"role": role, "content": "-"}]
            text = self._render(messages)
            end = text.find(placeholder)
            if not text.startswith(before) or end < 0:
                return _rewritten(before, text, i)
            if "zeroklthoughts" not in text[len(before) : end]:
                return _refusal(f"drops the thoughts of turn {i} once a message of the role {role} follows")
            if bos and bos in text[len(before) :]:
                return _refusal(f"writes {bos} again after turn {i}")
            before = text
        return None


def is_ids(content: Content) -> bool:
    """Whether a content is token ids."""
    return not isinstance(content, str) and (not content or type(content[0]) is int)


def _messages(content: Content) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}] if isinstance(content, str) else list(content)


def _plain(content: Content) -> str:
    """The text of a content where there is no chat template."""
    if isinstance(content, str):
        return content
    raise ValueError(
        f"environment: messages ({shown(content)}) need chat, and a tokenizer with a chat template"
    )


def _rewritten(before: str, text: str, turn: int) -> str:
    """Names the turn from which on a template has written another text than before."""
    same = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
    changed = max((i for i in range(1, turn) if f"zerokl{i}turn" in before[:same]), default=0)
    what = "the prompt" if not changed else f"what stands after turn {changed}"
    return _refusal(f"writes {what} in another way once turn {turn} is answered")


def _refusal(what: str) -> str:
    return (
        f"environment: the chat template {what}, so a later turn would not continue what the model drew; set "
        'environment.render = "append" to keep all turns as they were drawn'
    )
