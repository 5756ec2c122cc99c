"""Manifests for tests."""

from __future__ import annotations

import json
from pathlib import Path


def entry(name: str, question: str, answer: str = "1", **media: object) -> dict[str, object]:
    """One manifest entry with one question and one answer."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": name, **media, "conversations": turns}


def write_manifest(folder: Path, *entries: object, name: str = "manifest.json") -> Path:
    """Write a manifest as a list."""
    path = folder / name
    path.write_text(json.dumps(entries))
    return path
