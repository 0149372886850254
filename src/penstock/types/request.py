"""Defines a request and the limits of the engine that answers it."""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.types.sampling import SamplingParams


class AdapterUse(NamedTuple):
    """Names a registered adapter (LoRA) that a request is computed with, and what its update is multiplied by."""

    name: str
    scale: float = 1.0  # besides the scale that it was registered with


class BlockOffer(NamedTuple):
    """Allows another engine to read blocks of one prompt, once and within a lease. The id is the permission."""

    id: bytes  # 16 random bytes
    epoch: int  # of the engine that offers
    identity: bytes  # a digest of all that the contents of blocks depend on
    addresses: tuple[str, ...]  # where the blocks can be read, the fastest first
    first: int  # block of the prompt
    hashes: tuple[bytes, ...]  # chain hashes, of that block and those after it
    present: tuple[int, ...]  # for each block, a bit for each layer group whose block is there
    seconds: float  # that the lease lasts


class Claim(NamedTuple):
    """Says whose share of the engine a request uses, and how soon it is to be answered. Times are in seconds."""

    tenant: str = ""  # whose share it is; all who are not known are one tenant
    weight: float = 1.0  # share of the tenant: weight 3 gets three times the work of weight 1
    deadline: float | None = None  # from its arrival: if it has not begun by then, it fails
    ttft: float | None = None  # target, from its arrival to the first token of the answer
    itl: float | None = None  # target, from one token of the answer to the next

    def after(self, seconds: float) -> Claim:
        """Returns the claim that is left after `seconds`."""
        deadline, ttft = (None if time is None else max(time - seconds, 0.0) for time in (self.deadline, self.ttft))
        return self._replace(deadline=deadline, ttft=ttft)


NO_CLAIM = Claim()


class Request(NamedTuple):
    """Asks for one token stream. Its text is token ids already."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()  # end-of-text ids and the caller's own, resolved
    priority: int = 0  # lower runs sooner
    salt: str = ""  # prompts share cached blocks only under the same salt
    pooling: str = ""  # mean, cls or last: an embedding is wanted; classify: the logits of the model's labels
    owner: str = ""  # the sender: reports never show another owner's prompts
    explain: bool = False  # its report is to say which recent prompt it was nearest to
    background: bool = False  # may wait: runs behind every foreground request and never crowds them out
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the answer never completes
    dry_breakers: tuple[tuple[int, ...], ...] = ()  # token sequences that spell a breaker of the DRY penalty
    adapters: tuple[AdapterUse, ...] = ()  # their updates add up
    prediction: tuple[int, ...] = ()  # the answer that the client expects: it is drafted first
    speculation: int | None = None  # the most tokens that a step may draft for it; 0: none; None: the engine decides
    claim: Claim = NO_CLAIM  # whose share of the engine it uses, and how soon it is to be answered
    generated: tuple[int, ...] = ()  # tokens of its answer that another engine has delivered already: it is resumed
    scored: int = 0  # scores of its prompt's tokens that were delivered, if nothing was generated yet
    mirostat_mu: float | None = None  # what mirostat had learned by then, see Tokens
    durable: bool = True  # the KV of its prompt may be kept on disk, for requests with the same salt
    pull: BlockOffer | None = None  # blocks of its prompt that another engine has: they are read before it runs


class Limits(NamedTuple):
    """States what the engine can hold. It is decided once, before anything is allocated."""

    max_len: int  # tokens of one sequence, prompt and answer
    max_rows: int  # sequences in one step
    step_tokens: int  # tokens in one step
    block_size: int
    num_blocks: int
    vocab: int
    prefill_budget: int = 0  # tokens in one step while up to 64 rows answer; 0: step_tokens
    dim: int = 0  # values of a hidden state, and of an embedding
    pooling: str = "mean"  # how the model pools hidden states into an embedding
    encoder: bool = False  # the model makes embeddings only, each in one step
    states: int = 0  # places for saved recurrent states; 0: the model has none, its KV is all there is
    generates: bool = True  # else the model has embeddings and labels, and no text
    labels: tuple[str, ...] = ()  # classes of the classification head; empty: no such head
    activation: str = ""  # what turns the logits of labels into scores: sigmoid, softmax or identity
    second_text: int = 0  # is added to the token ids of a pair's second text
    windows: tuple[int, ...] = (0,)  # per KV layer group: how many positions its layers see; 0: all of them
    host_places: int = 0  # blocks that host memory keeps when they leave the device; 0: they are forgotten
    host_states: int = 0  # saved states that host memory keeps when their places are needed
    memory: int = 0  # bytes of weights, KV and states, without adapters; 0: not known

    def check(self) -> None:
        """Raises ConfigError for limits under which some sequence could never be computed."""
        if self.step_tokens < self.max_rows:
            raise ConfigError(
                f"a step of {self.step_tokens} tokens cannot serve {self.max_rows} rows: "
                "raise step_tokens or lower max_rows"
            )
        if self.encoder and self.max_len > self.step_tokens:
            raise ConfigError(
                f"a step of {self.step_tokens} tokens cannot hold one sequence of {self.max_len}: "
                "raise step_tokens or lower max_len"
            )
        chunk = self.max_len if self.encoder else 1
        if blocks_for(self.max_len, self.windows, self.block_size, chunk) > self.num_blocks:
            raise ConfigError(
                f"{self.num_blocks} blocks cannot hold one sequence of {self.max_len} tokens: "
                "give the KV cache more memory or lower max_len"
            )


PROMPT_PATIENCE = 4  # times as long as its prompt takes that a request lets shorter ones go first


def prefill_budget(base: int, answering: int) -> int:
    """Returns the tokens that a step may have while `answering` rows decode, where `base` suits up to 64 of them. Every
    64 more rows add one and a half times `base`, because a step that answers more rows may take longer."""
    return base * (3 * -(-answering // 64) - 1) // 2


def blocks_for(tokens: int, windows: tuple[int, ...], block_size: int, chunk: int = 1) -> int:
    """Returns how many blocks, of all layer groups together, a sequence of up to `tokens` tokens may hold at once while
    its steps compute at most `chunk` of them. Within a window only those blocks are held that the step still reads or
    writes: positions from `window - 1` before the chunk to its end, wherever in a block these begin."""
    whole = -(-tokens // block_size)
    return sum(min(whole, -(-(window + chunk - 2) // block_size) + 1) if window else whole for window in windows)
