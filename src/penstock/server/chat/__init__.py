"""Contains what the HTTP dialects share about chat: tools, structured output, streaming and the turn itself."""
