"""Chat templates over several turns: which ids stand between them, and which templates are refused."""

import pytest
from zerokl.engine.tasks.rendering import Renderer
from zerokl.engine.tasks.tokenizer import Tokenizer, character_tokenizer

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Drops the thoughts of a turn once a user's turn follows, as Qwen3's does.
FORGETS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<{{ m.role }}>{{ c }}<eos>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
COUNTS = PLAIN.replace("{{ m.content }}", "{{ messages|length }}{{ m.content }}")
DOUBLES = PLAIN.replace(
    "{% for m in messages %}", "{% for m in messages %}{% if m.role == 'user' %}<bos>{% endif %}"
)
FAILS = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}" + PLAIN
ONE_MORE = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=(),:> .?!'\"_;<[]{}|%\n"


@pytest.fixture
def tokenizer(tmp_path):
    def make(template: str) -> Tokenizer:
        hf = character_tokenizer(ONE_MORE)
        hf.add_special_tokens({"bos_token": "<bos>"})
        hf.chat_template = template
        hf.save_pretrained(tmp_path / "tokenizer")
        return Tokenizer(tmp_path / "tokenizer", 80)

    return make


def conversation(tokenizer: Tokenizer, contents: list, answers: list[str], mode: str = "template") -> str:
    """The text of a trajectory whose turns are `answers`, each with its stop token."""
    renderer, eos = Renderer(tokenizer, True, mode), min(tokenizer.stop_ids)
    transcript, ids = renderer.begin(contents[0])
    for turn, (answer, content) in enumerate(zip(answers, contents[1:], strict=True), 1):
        ids += [*tokenizer.encode_plain(answer), eos]
        ids += renderer.follow(transcript, content, turn, eos)
    return tokenizer.text(ids)


def rendered(tokenizer: Tokenizer, contents: list[str], answers: list[str]) -> str:
    """The same by the template alone."""
    messages = [{"role": "user", "content": contents[0]}]
    for answer, content in zip(answers, contents[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": content}]
    return tokenizer.render(messages)


def test_a_trajectory_is_what_the_template_makes_of_the_conversation(tokenizer):
    contents, answers = ["hello", "why?", "and then?"], ["hi", "a<b", "zerokl1turn"]
    plain = tokenizer(PLAIN)
    assert conversation(plain, contents, answers[:2]) == rendered(plain, contents, answers[:2])


def test_control_another_separator_is_not_what_the_template_makes(tokenizer, monkeypatch):
    continued, plain = Renderer._continued, tokenizer(PLAIN)
    monkeypatch.setattr(Renderer, "_continued", lambda *args: continued(*args).replace("\n", ""))
    contents, answers = ["hello", "why?"], ["hi"]
    assert conversation(plain, contents, answers) != rendered(plain, contents, answers)


def test_an_end_that_the_model_did_not_draw_is_written(tokenizer):
    renderer = Renderer(tokenizer(PLAIN), True)
    tok = renderer._tokenizer
    transcript, _ = renderer.begin("x")
    cut = tok.text(renderer.follow(transcript, "y", 1, tok.encode_plain("a")[0]))
    transcript, _ = renderer.begin("x")
    ended = tok.text(renderer.follow(transcript, "y", 1, min(tok.stop_ids)))
    assert (cut, ended) == ("<eos>\n<user>y<eos>\n<assistant>", "\n<user>y<eos>\n<assistant>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (FORGETS, "drops the thoughts of turn 1 once a message of the role user follows"),
        (COUNTS, "writes the prompt in another way once turn 1 is answered"),
        (DOUBLES, "writes <bos> again after turn 1"),
        (FAILS, "one turn only"),
    ],
)
def test_a_template_that_does_not_keep_earlier_turns_is_refused(tokenizer, template, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        Renderer(tokenizer(template), True)
    assert len(str(caught.value).splitlines()) == 1


def test_a_template_may_keep_a_turn_that_a_tool_answers_and_not_one_that_a_user_does(tokenizer):
    forgets = tokenizer(FORGETS)
    renderer, eos = Renderer(forgets, True, tools=[{"name": "f"}]), min(forgets.stop_ids)
    transcript, _ = renderer.begin("x")
    ids = renderer.follow(transcript, [{"role": "tool", "content": "1"}], 1, eos)
    assert forgets.text(ids) == "\n<tool>1<eos>\n<assistant>"
    with pytest.raises(
        ValueError, match="drops the thoughts of turn 1 once a message of the role user follows"
    ):
        renderer.follow(transcript, "and?", 2, eos)


def test_append_keeps_all_turns_as_they_were_drawn(tokenizer):
    answers = ["<think>\na\n</think>\n\nhi", "<think>\nb\n</think>\n\nho"]
    text = conversation(tokenizer(FORGETS), ["hello", "why?", "x"], answers, "append")
    assert text == rendered(tokenizer(PLAIN), ["hello", "why?", "x"], answers)


def test_control_the_template_alone_would_have_dropped_the_thoughts(tokenizer):
    answers = ["<think>\na\n</think>\n\nhi"]
    forgets = tokenizer(FORGETS)
    assert "a\n</think>" not in rendered(forgets, ["hello", "why?"], answers)


def test_several_messages_follow_together(tokenizer):
    renderer = Renderer(tokenizer(PLAIN), True)
    transcript, _ = renderer.begin([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    tools = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    ids = renderer.follow(transcript, tools, 1, min(renderer._tokenizer.stop_ids))
    assert renderer._tokenizer.text(ids) == "\n<tool>1<eos>\n<tool>2<eos>\n<assistant>"


def test_ids_are_taken_as_they_are_and_checked(tokenizer):
    renderer = Renderer(tokenizer(PLAIN), True)
    transcript, ids = renderer.begin([5, 6])
    assert ids == [5, 6]
    assert renderer.follow(transcript, [7, 8], 1, 1) == [7, 8]
    for wrong in ([80], [-1]):
        with pytest.raises(ValueError, match="is none of the model's"):
            renderer.follow(transcript, wrong, 1, 1)


def test_without_a_template_texts_are_plain(tokenizer):
    renderer = Renderer(tokenizer(PLAIN), chat=False)
    transcript, ids = renderer.begin("ab")
    assert renderer._tokenizer.text([*ids, *renderer.follow(transcript, "c", 1, 1)]) == "abc"
    with pytest.raises(ValueError, match="need chat"):
        renderer.begin([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="its tools need chat"):
        Renderer(tokenizer(PLAIN), False, tools=[{"name": "f"}])
