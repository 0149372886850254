"""penstock quantize and penstock eval."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

RECITED = "abcdefghijklménopqrstuvwxyz"
Penstock = Callable[..., tuple[int, str, str]]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(40 * RECITED)
    return tmp_path / "book.txt"


def test_a_folder_becomes_a_file_that_answers_alike(penstock: Penstock, reciter: Path, tmp_path: Path) -> None:
    out = tmp_path / "reciter.gguf"
    code, said, err = penstock("quantize", reciter, out, "--to", "q8_0")
    assert code == 0
    assert said.startswith(f"{out}  ")
    assert "Q8_0 99" in said
    assert err == "writing reciter.gguf\n"
    assert penstock("run", out, "Go", "--threads", 1)[:2] == (0, RECITED + "\n")


def test_a_summary_as_json(penstock: Penstock, reciter: Path, book: Path, tmp_path: Path) -> None:
    out = tmp_path / "reciter.gguf"
    words = ("--to", "q4_k", "--json", "--threads", 1, "--report", book)
    code, said, err = penstock("quantize", reciter, out, *words)
    facts = json.loads(said)
    assert code == 0
    assert facts["path"] == str(out)
    assert facts["size"] == out.stat().st_size < facts["size_before"]
    assert sorted(facts["notes"]) == [
        "weights with rows of 32, no multiple of 256, become Q5_0",
        "weights with rows of 320, no multiple of 256, become Q5_0",
        "weights with rows of 320, no multiple of 256, become Q8_0",
    ]
    assert all(note in err for note in facts["notes"])
    assert facts["kl"]["mean"] < 1e-3
    assert facts["kl"]["same_top"] == 1


def test_what_is_there_is_kept(penstock: Penstock, reciter: Path, tmp_path: Path) -> None:
    out = tmp_path / "reciter.gguf"
    out.write_text("mine")
    code, _, err = penstock("quantize", reciter, out)
    assert code == 2
    assert "--force overwrites it" in err
    assert out.read_text() == "mine"
    assert penstock("quantize", reciter, out, "--to", "f16", "--force")[0] == 0
    assert out.stat().st_size > 1000
    code, _, err = penstock("quantize", out, tmp_path / "less.gguf", "--to", "q4_0")
    assert code == 0
    code, _, err = penstock("quantize", tmp_path / "less.gguf", tmp_path / "least.gguf", "--to", "q5_0")
    assert code == 1
    assert "use --again to do it anyway" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("out.bin",), "must end in .gguf"),
        (("missing/out.gguf",), "its folder does not exist"),
        (("out.gguf", "--to", "q1"), "--to takes one of"),
    ],
)
def test_wrong_usage(penstock: Penstock, reciter: Path, words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, out, err = penstock("quantize", reciter, tmp_path / words[0], *words[1:])
    assert (code, out) == (2, "")
    assert said in err
    assert not (tmp_path / words[0]).exists()


def test_perplexity(penstock: Penstock, reciter: Path, babbler: Path, book: Path) -> None:
    words = ("--text", book, "--context", 64, "--tokens", 256, "--device", "ref")
    code, out, err = penstock("eval", "ppl", babbler, *words, "--json")
    found = json.loads(out)["perplexity"]
    assert (code, err) == (0, "")
    assert found["value"] == pytest.approx(1, abs=1e-6)
    assert found["predictions"] == 4 * 31
    natively = penstock("eval", "ppl", babbler, *words[:-1], "cpu", "--threads", 1, "--json")[1]
    assert json.loads(natively)["perplexity"]["value"] == pytest.approx(found["value"], abs=1e-4)
    code, out, _ = penstock("eval", "ppl", reciter, *words)  # which expects an end where the text begins again
    assert out.startswith("perplexity  ")
    assert float(out.split()[1]) > 2


def test_divergence(penstock: Penstock, reciter: Path, babbler: Path, book: Path) -> None:
    words = ("--text", book, "--context", 64, "--tokens", 200, "--threads", 1)
    code, out, _ = penstock("eval", "kl", babbler, "--against", babbler, *words, "--json")
    found = json.loads(out)["kl"]
    assert code == 0
    assert found["mean"] == found["most"] == 0
    assert found["predictions"] == 3 * 31
    found = json.loads(penstock("eval", "kl", reciter, "--against", babbler, *words, "--json")[1])["kl"]
    assert found["same_top"] == pytest.approx(1 - 1 / 28, abs=0.02)
    assert found["perplexity"]["value"] > found["reference"]["value"]
    assert found["mean"] > found["error"] > 0
    code, out, _ = penstock("eval", "kl", babbler, "--quantize", "q8_0", "--against", babbler, *words)
    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines()] == ["mean KL", "median", "same top token", "perplexity"]


def test_a_quantized_cache_is_compared_with_one_that_is_not(penstock: Penstock, smollm2: Path, book: Path) -> None:
    words = ("eval", "kl", smollm2, "--against", smollm2, "--text", book, "--context", 32, "--tokens", 64, "--json")
    found = {kv: json.loads(penstock(*words, "--kv", kv)[1])["kl"] for kv in ("int8", "int8:int4", "auto", "f32")}
    assert 0 < found["int8"]["mean"] < 0.1
    assert found["int8"]["mean"] < found["int8:int4"]["mean"] < 0.2
    assert found["int8:int4"]["reference"] == found["auto"]["reference"]
    assert found["int8"]["perplexity"]["value"] != found["int8"]["reference"]["value"]
    assert found["int8"]["reference"] == found["auto"]["reference"]
    assert found["auto"]["most"] == found["f32"]["most"] == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("kl", "MODEL", "--text", "BOOK"), 2, "--against is missing"),
        (("ppl", "MODEL", "--text", "nowhere.txt"), 1, "nowhere.txt"),
        (("ppl", "MODEL", "--text", "BOOK", "--context", "5000"), 1, "--context must be from 8 to 4096"),
        (("ppl", "MODEL", "--text", "BOOK", "--context", "4096"), 1, "one window needs 4096"),
        (("ppl", "MODEL", "--text", "BOOK", "--tokens", "3"), 1, "--tokens 3 is less than one window of 512 tokens"),
        (("kl", "MODEL", "--text", "BOOK", "--against", "OTHER"), 1, "different tokens"),
    ],
)
def test_refusals(
    penstock: Penstock,
    reciter: Path,
    smollm2: Path,
    book: Path,
    words: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    places = {"MODEL": str(reciter), "BOOK": str(book), "OTHER": str(smollm2)}
    found, out, err = penstock("eval", *(places.get(word, word) for word in words))
    assert (found, out) == (code, "")
    assert said in err
