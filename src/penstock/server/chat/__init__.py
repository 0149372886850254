"""What the HTTP dialects share about chat: tools, structured output, streaming and one chat turn."""
