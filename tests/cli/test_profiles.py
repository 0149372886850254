"""Tests `penstock serve --profile`: what a profile sets, what options change of it, and a name that there is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import server
from penstock.cli.framework.command import UsageError
from penstock.cli.serve import ShareOptions
from penstock.service_levels import PROFILES, Targets

SERVE = sys.modules["penstock.cli.serve"]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_sets_targets_patience_and_budget(name: str) -> None:
    options, profile = ShareOptions(profile=name), PROFILES[name]
    terms = options.terms()
    assert (terms.targets, terms.patience) == (profile.targets, profile.patience)
    assert options.engine({}) == ({"prefill_budget": profile.prefill_budget} if profile.prefill_budget else {})


def test_without_a_profile_the_default_one_holds() -> None:
    assert ShareOptions().terms() == ShareOptions(profile="default").terms()
    assert ShareOptions().terms().patience == 60.0


def test_options_count_before_the_profile() -> None:
    terms = ShareOptions(profile="voice", itl_target=80, max_wait=9.0).terms()
    assert (terms.targets, terms.patience) == (Targets(1.0, 0.08), 9.0)
    assert ShareOptions(profile="voice", ttft_target=300).terms().targets == Targets(0.3, 0.05)
    assert ShareOptions(profile="voice", max_wait=0.0).terms().patience is None
    throughput = ShareOptions(profile="throughput")
    assert throughput.engine({"prefill_budget": 64}) == {}
    assert throughput.engine({"step_tokens": 512}) == {"prefill_budget": 512}


def test_a_profile_that_there_is_not_is_told() -> None:
    for use in (ShareOptions.terms, ShareOptions.find_profile):
        with pytest.raises(UsageError, match=r"--profile takes default, chat, .* got 'chats'"):
            use(ShareOptions(profile="chats"))


def test_the_command_hands_the_profile_to_server_and_engine(
    penstock: Callable[..., tuple[int, str, str]], reciter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, terms, make = list[Any](), list[Any](), SERVE.ModelSources

    def sources(finder: Any, engine: dict[str, Any], *rest: Any) -> Any:
        engines.append(engine["prefill_budget"])
        return make(finder, engine, *rest)

    monkeypatch.setattr(SERVE, "ModelSources", sources)
    monkeypatch.setattr(server, "serve", lambda *given: terms.append(given[3].rules.terms))
    assert penstock("serve", reciter, "--profile", "throughput", "--itl-target", 70)[0] == 0
    assert penstock("serve", reciter, "--profile", "throughput", "--prefill-budget", 96, "--max-wait", 3)[0] == 0
    assert engines == [2048, 96]
    assert [(each.targets, each.patience) for each in terms] == [(Targets(None, 0.07), 600.0), (Targets(), 3.0)]
    code, _, told = penstock("serve", reciter, "--profile", "chats")
    assert code == 2
    assert "got 'chats'" in told
