"""An index of before is read as it is, so its version must say when the same files would give others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors

from hetero_strategy.data.build_index import VERSION
from hetero_strategy.data.conversation import Turn, item_mark
from hetero_strategy.data.tokenizer import ChatTokenizer
from tests import stock

IMAGE, AUDIO = item_mark("image"), item_mark("audio")
PINNED = (9, "872ae424bb9bfd48527a")
"""The version, and what the conversations below have given since."""
TEMPLATES = (
    None,
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "{{ eos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n<|im_end|>{% endfor %}",
)
TALKS: tuple[tuple[list[Turn], Mapping[str, list[int]]], ...] = (
    ([Turn("human", f"a{IMAGE} b{AUDIO}"), Turn("gpt", "1 2\n\n    3é\n")], {"image": [2], "audio": [1]}),
    ([Turn("system", "be brief"), Turn("human", " c "), Turn("gpt", "  4"), Turn("human", "d"), Turn("gpt", "5 ")], {}),
    ([Turn("human", "<|im_end|>"), Turn("gpt", "6 <|im_start|> \n7")], {}),
)


def digest(tmp_path: Path) -> str:
    file = stock.tokenizer(tmp_path, stock.QWEN_3, eos_token="<|im_end|>")
    own = Tokenizer.from_file(str(file))
    own.add_tokens([AddedToken(blank, special=False, normalized=False) for blank in ("\n\n", "    ")])
    own.post_processor = processors.ByteLevel(trim_offsets=True)
    own.save(str(file))
    found = hashlib.sha256()
    for number, template in enumerate(TEMPLATES):
        jinja = None if template is None else tmp_path / f"{number}.jinja"
        if jinja is not None:
            jinja.write_text(template or "")
        talks, rows = zip(*TALKS, strict=True)
        for encoded in ChatTokenizer(file, chat_template=jinja).encode_batch(talks, rows):
            found.update(repr((encoded.ids.tolist(), encoded.loss.tolist())).encode())
    return found.hexdigest()[:20]


def test_the_version_is_raised_where_ids_or_masks_change(tmp_path: Path) -> None:
    assert (VERSION, digest(tmp_path)) == PINNED, (
        "token ids or loss masks of the same files are others than before: raise VERSION in data/build_index.py, so"
        " that stored indices are built anew, and pin both here"
    )
