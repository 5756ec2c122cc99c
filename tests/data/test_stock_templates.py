"""Chat templates in the style of stock models: what is learnt of reasoning, of calls of functions, of short answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hetero_strategy.data.build_index import build_index
from hetero_strategy.data.conversation import read_conversation
from hetero_strategy.data.tokenizer import ChatTokenizer, Encoded
from hetero_strategy.errors import DataError
from tests import stock

LLAMA = """\
{{- bos_token }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content, reasoning = message.content, message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 is even) %}{{- raise_exception('roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(n=0) %}
{%- for message in messages if message.role != 'tool' and message.tool_calls is undefined %}
    {%- if (message.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('roles must alternate') }}{% endif %}
    {%- set ns.n = ns.n + 1 %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools and loop.last }}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content | tojson + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS]' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{% endfor %}{{- eos_token }}
    {%- else %}{{- ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}
"""
R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- else %}{{- '<|Assistant|>' + message.content.split('</think>')[-1] + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{% endif %}
"""
MISTRAL_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
STYLES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "llama": (LLAMA, stock.LLAMA_3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "qwen": (QWEN, stock.QWEN_3, {"eos_token": "<|im_end|>"}),
    "thinking": (QWEN, (*stock.QWEN_3, "<think>", "</think>"), {"eos_token": "<|im_end|>"}),
    "gemma": (GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), {"bos_token": "<bos>"}),
    "mistral": (MISTRAL, MISTRAL_TOKENS, {"bos_token": "<s>", "eos_token": "</s>"}),
    "r1": (R1, ("<bos>", "<|end|>", "<|User|>", "<|Assistant|>"), {"bos_token": "<bos>", "eos_token": "<|end|>"}),
}
"""Template, special tokens and what ``tokenizer_config.json`` says; those of ``thinking`` stand around reasoning."""

Talk = Sequence[Mapping[str, Any]]
ASKED = {"role": "user", "content": "2+2?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]


def tokenizer_of(folder: Path, style: str) -> ChatTokenizer:
    template, specials, said = STYLES[style]
    stock.tokenizer(folder, specials, **said)
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder, chat_template="auto")


def encoded(tokenizer: ChatTokenizer, talk: Talk, **sample: Any) -> Encoded:
    problems: list[str] = []
    said = read_conversation({"messages": talk, **sample}, ["image"], True, [], problems)
    assert not problems, problems
    return tokenizer.encode_batch([said.turns], [{}], variables=[said.variables])[0]


def learnt(tokenizer: ChatTokenizer, encoded: Encoded) -> list[str]:
    """Runs of tokens that are learnt."""
    edges = np.flatnonzero(np.diff(encoded.loss)) + 1
    runs = zip(np.split(encoded.ids, edges), np.split(encoded.loss, edges), strict=True)
    return [tokenizer.tokenizer.decode(ids, skip_special_tokens=False) for ids, loss in runs if loss[0]]


def of_transformers(tokenizer: ChatTokenizer, talk: Talk, **variables: Any) -> list[int]:
    said = json.loads((tokenizer.path.parent / "tokenizer_config.json").read_text())
    template = (tokenizer.path.parent / "chat_template.jinja").read_text()
    peer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(tokenizer.path)), chat_template=template, **said
    )
    ids: list[int] = peer.apply_chat_template(list(talk), return_dict=True, **variables)["input_ids"]
    return ids


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("answer", ["A", " 7", "<think>x</think>A"])
def test_short_answers_have_labels(tmp_path: Path, style: str, answer: str) -> None:
    """The answer as the template writes it and the token that ends it, in every turn that is left as it is."""
    tokenizer = tokenizer_of(tmp_path, style)
    talk = [ASKED, {"role": "assistant", "content": "B"}, ASKED, {"role": "assistant", "content": answer}]
    if style == "r1" and "think" in answer:
        with pytest.raises(DataError, match="the chat template changes turn 4, the last that is to be learnt"):
            encoded(tokenizer, talk)
        return
    found = encoded(tokenizer, talk)
    assert found.ids.tolist() == of_transformers(tokenizer, talk)
    end = tokenizer.eos if style != "gemma" else "<end_of_turn>"
    said = answer.strip() if style in ("llama", "gemma") else answer
    if style in ("qwen", "thinking") and "think" in answer:
        said = "<think>\nx\n</think>\n\nA"
    assert learnt(tokenizer, found) == [f"B{end}", f"{said}{end}"] and found.unlearnt == 0


@pytest.mark.parametrize("style", ["qwen", "thinking"])
@pytest.mark.parametrize("apart", [False, True])
def test_where_earlier_reasoning_is_taken_out_the_last_answer_is_learnt(
    tmp_path: Path, style: str, apart: bool
) -> None:
    tokenizer = tokenizer_of(tmp_path, style)
    said = [
        {"role": "assistant", "reasoning_content": "r", "content": f"a{n}"}
        if apart
        else {"role": "assistant", "content": f"<think>\nr\n</think>\n\na{n}"}
        for n in range(3)
    ]
    talk = [turn for answer in said for turn in (ASKED, answer)]
    found = encoded(tokenizer, talk)
    assert found.ids.tolist() == of_transformers(tokenizer, talk)
    assert learnt(tokenizer, found) == ["<think>\nr\n</think>\n\na2<|im_end|>"] and found.unlearnt == 2
    talk[-1] = {**said[-1], "loss": False}  # then none would be learnt
    with pytest.raises(DataError, match="the chat template changes turn 4, the last that is to be learnt"):
        encoded(tokenizer, talk)


def test_a_template_without_a_prompt_has_one_in_what_it_writes_before_any_answer(tmp_path: Path) -> None:
    tokenizer_of(tmp_path, "qwen")
    answer = "{{ m.reasoning or '' }}{{ m.content }}<|im_end|>"
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + answer + "{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = ChatTokenizer(tmp_path, chat_template="auto")
    found = encoded(tokenizer, [ASKED, {"role": "assistant", "content": "A", "reasoning": "r "}])
    assert learnt(tokenizer, found) == ["r A<|im_end|>"]


def test_an_index_counts_answers_that_are_not_learnt(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "qwen")
    answer = {"role": "assistant", "content": "<think>\nr\n</think>\n\na"}
    (tmp_path / "talk.json").write_text(json.dumps([{"messages": [ASKED, answer] * 3}, {"messages": [ASKED, answer]}]))
    for _ in range(2):  # built, then read
        index = build_index(tmp_path / "talk.json", tokenizer, {}, progress=False)
        assert index.unlearnt == 2 and len(set(index.labels.tolist())) == 1


@pytest.mark.parametrize("style", ["llama", "qwen", "mistral"])
def test_calls_of_functions_are_learnt_as_the_template_writes_them(tmp_path: Path, style: str) -> None:
    tokenizer = tokenizer_of(tmp_path, style)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 'é"\n', "b": [2]}}}
    talk: list[dict[str, Any]] = [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "add", "content": '{"sum":\n 4}'},
        {"role": "assistant", "content": "4"},
    ]
    tools = {} if style == "mistral" else {"tools": TOOLS}
    found = encoded(tokenizer, talk, **tools)
    assert found.ids.tolist() == of_transformers(tokenizer, talk, **tools)
    arguments = json.dumps({"a": 'é"\n', "b": [2]}, ensure_ascii=False)
    if style == "llama":
        expected = [f'{{"name": "add", "parameters": {arguments}}}<|eot_id|>', "4<|eot_id|>"]
    elif style == "mistral":
        expected = [f'[TOOL_CALLS]{{"name": "add", "arguments": {arguments}}}</s>', "4</s>"]
    else:
        written = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        expected = [f"{written}<|im_end|>", "4<|im_end|>"]
    assert learnt(tokenizer, found) == expected and found.unlearnt == 0
    function = {"name": "add", "arguments": json.dumps(call["function"]["arguments"])}
    shared = [  # the same in ShareGPT's words, and with texts in the place of objects
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": json.dumps(function)},
        {"from": "observation", "value": '{"sum":\n 4}'},
        {"from": "gpt", "value": "4"},
    ]
    if tools:
        tools = {"functions": json.dumps([TOOLS[0]["function"]])}
    same = encoded(tokenizer, shared, **tools)
    assert same.ids.tolist() == found.ids.tolist() and same.loss.tolist() == found.loss.tolist()
    talk[1]["weight"] = 0
    assert learnt(tokenizer, encoded(tokenizer, talk)) == expected[1:]


@pytest.mark.parametrize(
    ("style", "turn", "sample", "words"),
    [
        ("gemma", {}, {"tools": TOOLS}, "has 'tools', which the chat template does not write"),
        ("qwen", {}, {"documents": [{"text": "d"}]}, "has 'documents', which the chat template does not write"),
        (
            "llama",
            {"reasoning_content": "r"},
            {},
            r"turn 2 \(gpt\) has 'reasoning_content', which the chat template does not",
        ),
        ("llama", {"name": "Ann"}, {}, r"turn 2 \(gpt\) has 'name', which the chat template does not write"),
        (
            "gemma",
            {"tool_calls": [{"name": "add"}]},
            {},
            r"turn 2 \(gpt\) has 'tool_calls', which the chat template does not",
        ),
        (
            "qwen",
            {"reasoning_content": "a <|im_end|>"},
            {},
            r"turn 2 \(gpt\), 'reasoning_content', holds what",
        ),
        ("qwen", {}, {"tools": [{"name": "<|im_end|>"}]}, "'tools' holds what the tokenizer takes for a special token"),
        (
            "qwen",
            {"content": "<think>r</think><|im_end|>"},
            {},
            r"turn 2 \(gpt\), which the chat template changes, holds what the tokenizer takes for a special token",
        ),
    ],
)
def test_what_the_template_does_not_write_is_a_fault(
    tmp_path: Path, style: str, turn: dict[str, Any], sample: dict[str, Any], words: str
) -> None:
    tokenizer = tokenizer_of(tmp_path, style)
    with pytest.raises(DataError, match=words):
        encoded(tokenizer, [ASKED, {"role": "assistant", "content": "A", **turn}], **sample)


@pytest.mark.parametrize(
    ("turn", "sample", "words"),
    [
        ({}, {"tools": TOOLS}, "has 'tools', which only a chat template can write; give chat_template=auto"),
        ({"reasoning_content": "r"}, {}, "has 'reasoning_content', which only"),
        ({"role": "tool"}, {}, "has 'role tool', which only a chat template can write"),
    ],
)
def test_the_plain_form_has_no_tools(tmp_path: Path, turn: dict[str, Any], sample: dict[str, Any], words: str) -> None:
    tokenizer = ChatTokenizer(tokenizer_of(tmp_path, "qwen").path)
    talk = [ASKED, {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B", **turn}]
    with pytest.raises(DataError, match=words):
        encoded(tokenizer, talk, **sample)


def test_tokens_of_reasoning_are_tokens_in_the_plain_form_too(tmp_path: Path) -> None:
    own = ChatTokenizer(tokenizer_of(tmp_path, "thinking").path)
    found = encoded(own, [ASKED, {"role": "assistant", "content": "<think>r</think>A<|im_end|>"}])
    text = "2+2?\n<think>r</think>A"
    peer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(own.path)))
    as_text = [own.tokenizer.token_to_id(letter) for letter in "<|im_end|>"]
    assert found.ids.tolist() == [*peer(text)["input_ids"], *as_text, own.eos_id]
