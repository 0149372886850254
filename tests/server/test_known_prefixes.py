"""Tests what the server remembers of the prompts that its engine has seen."""

from __future__ import annotations

import pytest

from penstock.server.access.known_prefixes import BlockChain, KnownPrefixes

BLOCK = 4


def chain_of(*parts: range, salt: str = "") -> BlockChain:
    chain = BlockChain(salt)
    for part in parts:
        chain.extend(part, BLOCK)
    return chain


def test_a_chain_is_the_same_however_it_was_extended() -> None:
    whole = chain_of(range(19))
    assert len(whole.hashes) == 19 // BLOCK
    assert chain_of(range(3), range(3, 9), range(9, 9), range(9, 19)).hashes == whole.hashes
    assert not {*chain_of(range(19), salt="other").hashes} & {*whole.hashes}


def test_a_prompt_is_known_as_far_as_another_had_the_same_blocks() -> None:
    prefixes = KnownPrefixes()
    prefixes.remember(chain_of(range(12)), 100)
    assert prefixes.depth(chain_of(range(12), range(50, 60))) == 3
    assert prefixes.depth(chain_of(range(7), range(50, 60))) == 1
    assert prefixes.depth(chain_of(range(50, 60), range(12))) == 0
    assert prefixes.depth(chain_of(range(12), salt="other")) == 0


def test_the_deepest_blocks_of_the_oldest_prompts_are_forgotten_first() -> None:
    prefixes, old, used = KnownPrefixes(), chain_of(range(12)), chain_of(range(100, 112))
    prefixes.remember(used, 6)
    prefixes.remember(old, 6)
    prefixes.remember(used, 6)
    prefixes.remember(chain_of(range(200, 208)), 6)
    assert (prefixes.depth(old), prefixes.depth(used)) == (1, 3)


def test_experience_corrects_what_is_remembered() -> None:
    prefixes = KnownPrefixes()
    assert prefixes.uncached(1000, 600) == 400
    for _ in range(50):
        prefixes.observe(1000, 600, 300)  # half of what is remembered is gone
    assert prefixes.uncached(1000, 600) == pytest.approx(700, abs=5)
    for _ in range(50):
        prefixes.observe(1000, 0, 900)  # another client of the engine has sent most of these prompts
    assert prefixes.uncached(1000, 0) == pytest.approx(100, abs=5)
