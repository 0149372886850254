"""Opens a config's draft model or head, and refuses one that cannot draft for its target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import MTP, OFF, Config
from penstock.errors import ConfigError, PenstockError
from penstock.model import eagle
from penstock.model.eagle import EagleHead
from penstock.model.load import CONFIG, Checkpoint, open_checkpoint, text_of
from penstock.model.mtp_head import is_head, open_mtp
from penstock.model.open_files import read_json

if TYPE_CHECKING:
    from penstock.text import Tokenizer

SHOWN = 4  # differing tokens listed in an error


def open_draft(config: Config, target: Checkpoint) -> Checkpoint | None:
    """Opens the config's draft model or head, if any. Raises ConfigError if it cannot draft for the target."""
    if not config.draft:
        return None
    if config.speculation == OFF:
        raise ConfigError("--draft is of no use with --speculation off: leave out one of them")
    draft = open_mtp(target) if config.draft == MTP else _open(Path(config.draft))
    for problem in _problems(draft, target):
        raise ConfigError(f"{draft.name} cannot draft for {target.name}: {problem}")
    return draft


def _open(path: Path) -> Checkpoint:
    if path.is_dir() and (path / CONFIG).exists():
        values = read_json(path / CONFIG)
        if eagle.is_eagle(values):
            return eagle.open_eagle(path)
        eagle.refuse_older(values, path.name)
    return open_checkpoint(path)


def group_of(target: Checkpoint) -> int:
    """Returns the target's KV layer group that also holds a draft model's KV: the one without a window."""
    return target.spec.windows.index(0)


def _problems(draft: Checkpoint, target: Checkpoint) -> Iterator[str]:
    for each in (draft, target):
        if each.spec.encoder:
            yield f"{each.name} is an encoder and generates no text"
    if draft.spec.recurrence is not None:
        yield f"{draft.name} has recurrent layers, whose state cannot go back to before a rejected draft"
    if 0 not in target.spec.windows:
        yield f"all layers of {target.name} have windows, so no KV block stays for as long as a draft model needs it"
    if isinstance(draft, EagleHead):
        yield from eagle.problems(draft, target)
        return
    sizes = draft.spec.vocab, target.spec.vocab
    if sizes[0] != sizes[1]:
        yield f"their vocabularies have {sizes[0]:,} and {sizes[1]:,} tokens and must be the same"
    if not is_head(draft) and (found := _differing_tokens(draft, target)):
        yield f"their vocabularies differ, so that a token has two meanings: {found}"


def _differing_tokens(draft: Checkpoint, target: Checkpoint) -> str:
    """Describes tokens that differ between the vocabularies, including special and added ones; "" if all agree. Models
    without a tokenizer use raw token ids, which always agree.
    """
    try:
        mine, other = text_of(draft).tokenizer, text_of(target).tokenizer
    except PenstockError:
        return ""
    differing = [id for id in range(target.spec.vocab) if mine.token_bytes(id) != other.token_bytes(id)]
    shown = [f"{id} is {_shown(mine, id)} and {_shown(other, id)}" for id in differing[:SHOWN]]
    more = [f"and {len(differing) - SHOWN:,} more"] if len(differing) > SHOWN else []
    return ", ".join((*shown, *more))


def _shown(tokenizer: Tokenizer, id: int) -> str:
    text = repr(tokenizer.token_text(id)) if tokenizer.token_bytes(id) else "nothing"
    return f"the special token {text}" if id in tokenizer.special_ids else text
