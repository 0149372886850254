"""Options of `penstock serve` that replace what a model's files say about chats and sampling, and those of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.framework.command import UsageError
from penstock.cli.serve import SpeculativeOptions, TemplateOptions
from penstock.config import DEFAULTS
from penstock.errors import ConfigError
from penstock.text.named_templates import TEMPLATES


def test_the_template_of_the_options(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}")
    assert TemplateOptions().source() == ""
    assert TemplateOptions(chat_template="llama3").source() == TEMPLATES["llama3"]
    assert TemplateOptions(chat_template="one {{ 1 }}").source() == "one {{ 1 }}"
    assert TemplateOptions(chat_template=str(file)).source() == "{{ messages[0].content }}"
    assert TemplateOptions(chat_template_file=str(file)).source() == "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match="name two templates"):
        TemplateOptions(chat_template="llama3", chat_template_file=str(file)).source()
    with pytest.raises(ConfigError, match="neither a file"):
        TemplateOptions(chat_template_file=str(tmp_path / "none.jinja")).source()


def test_the_sampling_of_the_options() -> None:
    assert TemplateOptions(override_generation_config='{"seed": 42}').sampling() == {"seed": 42}
    assert TemplateOptions().sampling() == {}


def test_speculation_may_be_set_by_vllms_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert SpeculativeOptions().options(DEFAULTS) == {}
    vllms = SpeculativeOptions('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}')
    assert vllms.options(DEFAULTS) == {"speculation": "4"}
    assert "without effect here: prompt_lookup_min" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--speculation is also set by --speculative-config"):
        vllms.options(DEFAULTS | {"speculation": "8"})
    with pytest.raises(ConfigError, match="'eagle', which is not supported"):
        SpeculativeOptions('{"method": "eagle"}').options(DEFAULTS)


def test_a_draft_model_may_be_set_by_the_options_of_vllm_and_llama_cpp() -> None:
    vllms, theirs = '{"method": "draft_model", "model": "small"}', SpeculativeOptions(model_draft="small")
    assert SpeculativeOptions(vllms).options(DEFAULTS) == {"speculation": "auto", "draft": "small"}
    assert theirs.options(DEFAULTS) == {"draft": "small"}
    for twice in (SpeculativeOptions(vllms), theirs):
        with pytest.raises(UsageError, match="--draft is also set by --speculative-config or --model-draft"):
            twice.options(DEFAULTS | {"draft": "smaller"})
    with pytest.raises(UsageError, match="--draft is also set"):
        SpeculativeOptions(vllms, "smaller").options(DEFAULTS)
