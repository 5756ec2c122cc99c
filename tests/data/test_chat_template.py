"""Chat templates: the ids are those of transformers, and the loss is on answers and on what ends them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hetero_strategy.data.build_index import build_index
from hetero_strategy.data.conversation import Turn, item_mark
from hetero_strategy.data.tokenizer import ChatTokenizer, Encoded
from hetero_strategy.errors import ConfigError, DataError
from tests import stock

MARKED = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '[' + message['role'] + ']\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] + '[end]' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + '[end]' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}
"""
TRIMMED = """\
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}
{%- for message in messages -%}
  {{ '[user]' if loop.index0 is even else '[assistant]' }}{{ message['content'] | trim }}
  {%- if loop.index0 is odd %} {{ eos_token }}{% endif %}
{%- endfor %}
"""
IMAGE = item_mark("image")
SPECIALS = ("[user]", "[assistant]", "[system]", "[end]")
TALK = [("human", f" 12 {IMAGE}\n34"), ("gpt", "5 [end] 6 "), ("human", "7"), ("gpt", "89")]


@pytest.fixture
def folder(digits: Path, tmp_path: Path) -> Path:
    """A tokenizer with markers of turns, and a chat template of its own."""
    tokenizer = Tokenizer.from_file(str(digits / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    return tmp_path


def turns(talk: Sequence[tuple[str, str]]) -> list[Turn]:
    return [Turn(role, text) for role, text in talk]


def texts(tokenizer: ChatTokenizer, encoded: Encoded, learnt: bool) -> list[str]:
    """Runs of tokens that are learnt, or that are not."""
    edges = np.flatnonzero(np.diff(encoded.loss)) + 1
    runs = zip(np.split(encoded.ids, edges), np.split(encoded.loss, edges), strict=True)
    return [tokenizer.tokenizer.decode(ids, skip_special_tokens=False) for ids, loss in runs if loss[0] == learnt]


SPACED = """\
{%- for message in messages %}
    {%- set parts = message['content'] %}
    {%- if message['role'] == 'assistant' %}{{ ' ' }}{% generation %}{{ parts[0]['text'] + '[end]' }}{% endgeneration %}
    {%- else %}{{ '[user] ' + parts[0]['text'] + strftime_now(' %d ') + '[assistant]' }}
    {%- endif %}
{%- endfor %}
"""


@pytest.mark.parametrize("system", [False, True])
def test_ids_and_loss_are_those_of_transformers(folder: Path, system: bool) -> None:
    talk = [("system", "be\nbrief"), *TALK][0 if system else 1 :]
    plain = [(role, text.replace("[end]", "").replace(IMAGE, "")) for role, text in talk]
    tokenizer = ChatTokenizer(folder, chat_template="auto")
    encoded = tokenizer.encode_batch([turns(plain)], [{}])[0]
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    peer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")), bos_token="<bos>", chat_template=MARKED
    )
    expected = peer.apply_chat_template(
        [{"role": roles[role], "content": text} for role, text in plain],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert encoded.ids.tolist() == expected["input_ids"]
    assert encoded.loss.astype(int).tolist() == expected["assistant_masks"]
    assert encoded.loss.any() and not encoded.loss.all()


def test_so_they_are_where_a_space_belongs_to_what_follows_it(folder: Path) -> None:
    """As in Llama 2 and Mistral; and contents may be lists of parts, as templates for pictures want them."""
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    vocabulary = own.get_vocab()
    more = {"\u2581": len(vocabulary), "\u25815": len(vocabulary) + 1}
    own.model = models.BPE({**vocabulary, **more}, [("\u2581", "5")], unk_token="<unk>")
    own.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(SPACED)
    tokenizer = ChatTokenizer(folder, chat_template="auto")
    encoded = tokenizer.encode_batch([turns([("human", "12"), ("gpt", "5 6"), ("human", "7"), ("gpt", "89")])], [{}])[0]
    peer = PreTrainedTokenizerFast(tokenizer_object=own, chat_template=SPACED.replace("strftime_now(' %d ')", "' 26 '"))
    texts_of = [("user", "12"), ("assistant", "5 6"), ("user", "7"), ("assistant", "89")]
    expected = peer.apply_chat_template(
        [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts_of],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert encoded.ids.tolist() == expected["input_ids"]
    assert encoded.loss.astype(int).tolist() == expected["assistant_masks"]
    assert encoded.loss[encoded.ids == more["\u25815"]].tolist() == [True]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_so_they_are_behind_an_item(folder: Path, scheme: str) -> None:
    """As in Llama 2 and Mistral: text there is not the first of the sample."""
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    own.model = models.BPE(own.get_vocab() | {"\u2581": own.get_vocab_size()}, [], unk_token="<unk>")
    own.save(str(folder / "tokenizer.json"))
    tokenizer = ChatTokenizer(folder, chat_template="auto")
    talk = [("human", f"1{IMAGE}2 3{IMAGE}{IMAGE}4"), ("gpt", " 5 6")]
    encoded = tokenizer.encode_batch([turns(talk)], [{"image": [1, 1, 1]}])[0]
    peer = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<bos>", chat_template=MARKED)
    expected = peer.apply_chat_template(
        [
            {"role": role, "content": text.replace(IMAGE, "<image>")}
            for role, (_, text) in zip(("user", "assistant"), talk, strict=True)
        ],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert encoded.ids.tolist() == expected["input_ids"]
    assert encoded.loss.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("before_the_end", ["", "\n", "    "])
def test_added_blanks_are_text(folder: Path, before_the_end: str) -> None:
    """As in Gemma, whose newlines and runs of spaces are added tokens: they are learnt, and none ends an answer."""
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    blanks = ["\n", "\n\n", "    ", "\u2581\u2581"]
    own.add_tokens([AddedToken(blank, special=False, normalized=False) for blank in blanks])
    own.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + before_the_end + "[end]\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = ChatTokenizer(folder, chat_template="auto")
    for answer in ("1\n\n    2\u2581\u2581\n3", "    1[end]\n2"):  # as a whole, and in pieces
        encoded = tokenizer.encode_batch([turns([("human", "4\n"), ("gpt", answer)])], [{}])[0]
        assert texts(tokenizer, encoded, True) == [f"{answer}{before_the_end}[end]"]
        added = [encoded.ids == own.token_to_id(blank) for blank in ("\n", "    ")]
        assert all(found[encoded.loss].any() for found in added)


def test_blanks_are_learnt_where_a_post_processor_trims_them(folder: Path, tmp_path: Path) -> None:
    """As that of byte-level tokenizers does unless told otherwise."""
    file = stock.tokenizer(tmp_path / "bytes", SPECIALS)
    own = Tokenizer.from_file(str(file))
    own.post_processor = processors.ByteLevel(trim_offsets=True)
    own.save(str(file))
    tokenizer = ChatTokenizer(file, eos="[end]", chat_template=folder / "chat_template.jinja")
    encoded = tokenizer.encode_batch([turns([("human", "1"), ("gpt", "2  3 \n 4")])], [{}])[0]
    assert texts(tokenizer, encoded, True) == ["2  3 \n 4[end]"]
    assert encoded.ids.tolist() == own.encode("[user]\n1[end]\n[assistant]\n2  3 \n 4[end]\n").ids


def test_what_turns_say_is_text_and_media_are_rows(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder, chat_template=folder / "chat_template.jinja")
    encoded = tokenizer.encode_batch([turns(TALK)], [{"image": [3]}])[0]
    assert texts(tokenizer, encoded, True) == ["5 [end] 6 [end]", "89[end]"]
    assert texts(tokenizer, encoded, False)[0] == "<bos>[user]\n 12 <image><image><image>\n34[end]\n[assistant]\n"
    ends = (encoded.ids == tokenizer.tokenizer.token_to_id("[end]")).sum()
    assert ends == 4 and encoded.starts["image"].tolist() == [len("?? 12 ") + 1]


def test_items_are_no_text_that_looks_special_and_blanks_of_answers_are_no_part_of_tokens(folder: Path) -> None:
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.add_special_tokens([AddedToken("[assistant]", special=True, normalized=False, rstrip=True)])
    own.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(THINKING.replace("<think></think>", ""))
    tokenizer = ChatTokenizer(folder, chat_template="auto")
    encoded = tokenizer.encode_batch([turns([("human", f"1{IMAGE}2"), ("gpt", "  34")])], [{"image": [2]}])[0]
    assert texts(tokenizer, encoded, False) == ["[user]1<image><image>2[end][assistant]"]
    assert texts(tokenizer, encoded, True) == ["34[end]"]  # [assistant] takes the blanks in, as whole texts show


def test_a_template_that_trims_and_ends_with_eos(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "{{ x"}, {"name": "default", "template": TRIMMED}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": several}))
    tokenizer = ChatTokenizer(folder, chat_template="auto")
    assert tokenizer.settings()["chat_template"] == TRIMMED and "chat_template" not in ChatTokenizer(folder).settings()
    talk = [("human", " 1 "), ("gpt", "2\n"), ("human", "3"), ("gpt", " 4")]
    encoded = tokenizer.encode_batch([turns(talk)], [{}])[0]
    assert texts(tokenizer, encoded, False) == ["[user]1[assistant]", "[user]3[assistant]"]
    assert texts(tokenizer, encoded, True) == ["2 <eos>", "4 <eos>"]
    sent = pickle.loads(pickle.dumps(tokenizer)).encode_batch([turns(talk)], [{}])[0]
    assert sent.ids.tolist() == encoded.ids.tolist()


@pytest.mark.parametrize("name", ["bos_token", "end_of_turn_token"])
def test_an_index_follows_the_tokens_that_a_template_names(folder: Path, name: str) -> None:
    template = f"{{{{ {name} }}}}{{% for m in messages %}}[{{{{ m.role }}}}]{{{{ m.content }}}}[end]{{% endfor %}}"
    (folder / "chat_template.jinja").write_text(template)
    said = [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]
    (folder / "talk.json").write_text(json.dumps([{"id": "a", "conversations": said}]))
    for token in ("[system]", "<eos>"):
        config = {"add_bos_token": False, "eos_token": "<eos>", name: token}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = ChatTokenizer(folder, chat_template="auto")
        index = build_index(folder / "talk.json", tokenizer, {}, progress=False)
        assert tokenizer.tokenizer.id_to_token(int(index.ids[0])) == token
    assert "variables" not in ChatTokenizer(folder).settings()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (TRIMMED, "refuses the conversation: no system turns"),
        ("{{ messages[1]['content'] }}[end]", "writes turn 1 (system) 0 times"),
        ("{% for m in messages %}{{ m.content + m.content }}[end]{% endfor %}", "writes turn 1 (system) 2 times"),
        ("{% for m in messages %}{{ m.content }}\nEND[end]{% endfor %}", "no token of its own right behind an answer"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no token of its own right behind an answer"),
        ("{{ messages[5].content }}", "refuses the conversation: "),
        ("{{ messages[0].content + 1 }}", "refuses the conversation: can only concatenate"),
        (
            "{% for m in messages %}{{ '3' if m.content == '2' else m.content }}[end]{% endfor %}",
            "changes turn 3, the last that is to be learnt",
        ),
    ],
)
def test_a_conversation_that_it_cannot_write_is_a_fault(folder: Path, digits: Path, template: str, words: str) -> None:
    file = folder / "own.jinja"
    file.write_text(template)
    tokenizer = ChatTokenizer(folder, chat_template=file)
    talk = [("system", "0"), ("human", "1"), ("gpt", "2")]
    with pytest.raises(DataError) as error:
        tokenizer.encode_batch([turns(talk)], [{}])
    assert words in str(error.value)
    manifest = folder / "talk.json"
    said = [{"from": role, "value": text} for role, text in talk]
    manifest.write_text(json.dumps([{"id": "a", "conversations": said}]))
    with pytest.raises(DataError) as error:
        build_index(manifest, tokenizer, {}, progress=False)
    assert "sample 'a': the chat template" in str(error.value) and "no tokens" not in str(error.value)


THINKING = """\
{%- for m in messages -%}
  [{{ m.role }}]{{ '<think></think>' if m.role == 'assistant' and '<think>' not in m.content }}{{ m.content }}[end]
{%- endfor %}
"""


def test_a_template_may_add_what_is_missing_in_a_turn(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(THINKING)
    tokenizer = ChatTokenizer(folder, chat_template="auto")
    for said, learnt in (("2", "2[end]"), ("<think>1</think>2", "<think>1</think>2[end]")):
        encoded = tokenizer.encode_batch([turns([("human", "1"), ("gpt", said)])], [{}])[0]
        assert texts(tokenizer, encoded, True) == [learnt]
        added = "<think></think>" if said == "2" else ""
        assert texts(tokenizer, encoded, False) == [f"[user]1[end][assistant]{added}"]


@pytest.mark.parametrize("answer", ["a", "user", "is", "\n", "[", "1"])
def test_short_turns_are_not_found_in_words_of_the_template(folder: Path, answer: str) -> None:
    """A template that looks into one answer, as Qwen 3's for reasoning, may write all others as ever."""
    (folder / "chat_template.jinja").write_text(THINKING)
    tokenizer, last = ChatTokenizer(folder, chat_template="auto"), "<think>1</think>2"
    talk = [("human", answer), ("gpt", answer), ("human", "s"), ("gpt", last)]
    encoded = tokenizer.encode_batch([turns(talk)], [{}])[0]
    assert texts(tokenizer, encoded, True) == [f"{answer}[end]", f"{last}[end]"]
    assert texts(tokenizer, encoded, False) == [
        f"[user]{answer}[end][assistant]<think></think>",
        "[user]s[end][assistant]",
    ]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"0": {"content": "[user]"}, "200": {"content": "<new>"}}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["[user]", {"content": "<new>"}, "<new>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "[user]", "audio_token": "<new>"}}),
        ("tokenizer_config.json", {"extra_special_tokens": ["[user]", "<new>"], "pad_token": "<pad>"}),
        ("tokenizer_config.json", {"image_token": "<new>", "add_bos_token": True}),
        ("special_tokens_map.json", {"additional_special_tokens": ["<new>"], "sep_token": {"content": "[user]"}}),
        ("added_tokens.json", {"[user]": 0, "<new>": 200}),
    ],
)
def test_tokens_that_a_file_beside_the_tokenizer_adds_must_be_in_it(
    folder: Path, file: str, content: dict[str, Any]
) -> None:
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"tokenizer.json has no token '<new>', which .* anew with transformers"):
        ChatTokenizer(folder, chat_template="auto")
    ChatTokenizer(folder)  # the plain form has no need of them
    (folder / file).write_text(json.dumps(content).replace("<new>", "[end]"))
    ChatTokenizer(folder, chat_template="auto")


def test_what_is_no_template_is_refused(folder: Path) -> None:
    for name, words in (("nowhere.jinja", "is missing"), ("bad.jinja", "not a Jinja template")):
        (folder / "bad.jinja").write_text("{% for")
        with pytest.raises(ConfigError, match=words):
            ChatTokenizer(folder, chat_template=folder / name)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"neither .*chat_template.jinja nor .*tokenizer_config.json has one"):
        ChatTokenizer(folder, chat_template="auto")
