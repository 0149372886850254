"""Tests that no folder gets more of the patterns that make English hard to read. What is there may only become less."""

from __future__ import annotations

import json

from tests.house import english


def test_no_pattern_spreads() -> None:
    recorded, now = json.loads(english.RECORDED.read_text()), english.counted()
    risen = {
        f"{folder}: {pattern}": (recorded.get(folder, {}).get(pattern, 0), count)
        for folder, counts in now.items()
        for pattern, count in counts.items()
        if count > recorded.get(folder, {}).get(pattern, 0)
    }
    assert not risen, "say it plainly; `python -m tests.house.english show` prints the places"


def test_docstrings_comments_and_patterns_are_found() -> None:
    source = '"""Returns what is read."""\nx = 1  # of those of others, so many\n'
    assert [text for _, text in english.prose(source)] == ["Returns what is read.", "# of those of others, so many"]
    assert english.counted()["docs"]
