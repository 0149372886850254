"""The default model through the reference: real files, a real answer."""

from __future__ import annotations

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.ref import RefBackend
from penstock.model.load import load_model, load_text, open_checkpoint


def test_it_knows_the_capital_of_france(smollm2):
    text = load_text(smollm2)
    backend = RefBackend()
    backend.load(load_model(open_checkpoint(smollm2), backend))
    backend.reserve_kv(num_blocks=1, block_size=16)
    prompt = text.encode_prompt("The capital of France is")
    result = backend.wait(backend.launch(greedy_batch([Chunk(prompt, 0, [0], sample=1)])))
    assert list(result.rows[0].tokens) == text.encode_prompt(" Paris")
