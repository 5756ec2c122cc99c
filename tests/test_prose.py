"""Docstrings and pages keep to the rules of plain English that a program can hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for room in ("hetero_strategy", "recipes", "benchmarks") for path in (ROOT / room).rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md"])
FRAGMENT = re.compile(r"(Of|That|Those|The same|See|Likewise|What|Where|As)\b")
ARGUMENT = re.compile(r"\s+\w+: of ")
MOST_WORDS = 30


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                lines = [line for line in text.splitlines() if ARGUMENT.match(line)]
                wrong += [f"{path.relative_to(ROOT)}: {line}" for line in [text] * bool(FRAGMENT.match(text)) + lines]
    assert not wrong, "\n".join(wrong)


def sentences(page: str) -> list[str]:
    """Return the sentences of a page's running text, without code, tables and addresses of links."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "!["))]
    blocks = re.split(r"\n\s*\n|\n\s*(?:[*-]|\d+\.) ", "\n".join(lines))
    return [sentence for block in blocks for sentence in re.split(r"(?<=[.!?:])\s", " ".join(block.split()))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_of_pages_are_short(page: Path) -> None:
    long = [sentence for sentence in sentences(page.read_text()) if len(sentence.split()) > MOST_WORDS]
    assert not long, "\n".join(long)


def test_long_sentences_and_fragments_are_noticed() -> None:
    assert FRAGMENT.match("Of all ranks.") and ARGUMENT.match("    dtype: of what travels")
    assert sentences("* One. Two `a. b`.\n* Three\n\n```\nno. code.\n```")[:3] == ["* One.", "Two code.", "Three"]
