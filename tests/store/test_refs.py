from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import home
from penstock.errors import InvalidRequest, ModelNotFound, PenstockError
from penstock.store.paths import ModelPaths
from penstock.store.refs import ALIASES, HubRepo, PypiFile, name_of, parse


@pytest.mark.parametrize(
    ("ref", "source"),
    [
        ("pypi:pack/m.gguf", PypiFile("pack", "", "m.gguf")),
        ("pypi:pack==1.2.post1/sub/m.Q4_1.gguf", PypiFile("pack", "1.2.post1", "sub/m.Q4_1.gguf")),
        ("hf:owner/repo", HubRepo("owner/repo")),
        ("hf:owner/repo-1.5/q/m.gguf", HubRepo("owner/repo-1.5", "q/m.gguf")),
        ("hf:owner/repo:Q4_K_M", HubRepo("owner/repo", quantization="Q4_K_M")),
    ],
)
def test_references_are_read_and_written_alike(ref: str, source: PypiFile | HubRepo) -> None:
    assert parse(ref) == source
    assert str(source) == name_of(source) == ref


@pytest.mark.parametrize(
    "ref", ["pypi:pack", "pypi:a/../m.gguf", "pypi:-a/m.gguf", "pypi:a/b.bin", "hf:repo", "hf:a/..", "hf:a/b:"]
)
def test_other_references_are_refused(ref: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a model reference"):
        parse(ref)


def test_a_tag_of_a_repository_is_a_quantization() -> None:
    source = HubRepo("owner/repo", quantization="Q4_K_M")
    refs = ("owner/repo:q4_k_m", "hf.co/owner/repo:Q4_K_M", "https://huggingface.co/owner/repo:Q4_K_m")
    assert [parse(ref) for ref in refs] == [source] * 3
    assert parse("hf.co/owner/repo:latest") == HubRepo("owner/repo")
    assert parse("owner/repo:fp16") == HubRepo("owner/repo", quantization="F16")
    for ref in ("owner/repo:main", "hf:owner/repo:7b"):
        with pytest.raises(ModelNotFound, match="is not a quantization such as Q4_K_M"):
            parse(ref)


def test_a_spelled_out_alias_is_the_alias() -> None:
    spelled = str(ALIASES["smollm2"])
    assert spelled != "smollm2"
    assert name_of(parse(spelled)) == "smollm2"  # type: ignore[arg-type]
    assert parse(spelled).sha256  # type: ignore[union-attr]


def test_a_folder_without_a_config_stands_for_the_gguf_model_in_it(tmp_path: Path) -> None:
    assert parse(str(tmp_path)) == tmp_path
    for name in ("mmproj-F16.gguf", "m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "README.md"):
        (tmp_path / name).touch()
    assert parse(str(tmp_path)) == tmp_path / "m-00001-of-00002.gguf"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"give the path of one: m-00001-of-00002\.gguf, other\.gguf"):
        parse(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert parse(str(tmp_path)) == tmp_path


def test_paths_and_unknown_names(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert parse(str(file)) == file
    with pytest.raises(ModelNotFound, match="no file or folder"):
        parse(str(tmp_path / "other.gguf"))
    for odd in ("~nobody/m.gguf", "\0/", "x/" * 5000):
        with pytest.raises(ModelNotFound, match="no file or folder"):
            parse(odd)
    assert parse("owner/repo-1.5") == HubRepo("owner/repo-1.5")
    with pytest.raises(ModelNotFound, match="did you mean smollm2"):
        parse("smolm2")
    with pytest.raises(ModelNotFound, match="penstock list --all"):
        parse("")


@given(st.text(st.sampled_from("ab./:=-~\\ \0"), max_size=20))
def test_no_reference_leads_out_of_the_store(rest: str) -> None:
    for scheme in ("pypi:", "hf:"):
        try:
            source = parse(scheme + rest)
        except PenstockError:
            continue
        assert not isinstance(source, Path)
        place = ModelPaths(Path("/store"), name_of(source))
        assert place.folder.resolve().parent == Path("/store/models")


def test_home_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_HOME")
    monkeypatch.setenv("HOME", "/user")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setattr("sys.platform", "linux")
    assert home() == Path("/caches/penstock")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home() == Path("/user/.cache/penstock")
    monkeypatch.setattr("sys.platform", "darwin")
    assert home() == Path("/user/Library/Caches/penstock")
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert home() == Path("/local/penstock")
    monkeypatch.setenv("PENSTOCK_HOME", "~/models")
    assert home() == Path("/user/models")
