"""OpenAI's responses: items in, events out, and a memory of what was said."""
