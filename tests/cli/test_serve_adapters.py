"""Which model of a server gets the adapters of its command line."""

from __future__ import annotations

import pytest

from penstock.cli.served_models import adapters_by_model
from penstock.errors import ConfigError


def test_adapters_belong_to_the_first_model_or_to_the_one_that_is_named() -> None:
    given = ["a=./a", "second/b=./b:0.5", '{"name": "c", "path": "./c"}', "third/d=./d"]
    assert adapters_by_model(given, ["first", "second"]) == {
        "first": ("a=./a", '{"name": "c", "path": "./c"}', "third/d=./d"),
        "second": ("b=./b:0.5",),
    }


@pytest.mark.parametrize("given", [["second=./a"], ["a=./a", "second/a=./b"]])
def test_no_name_means_two_things(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="take another name"):
        adapters_by_model(given, ["first", "second"])
