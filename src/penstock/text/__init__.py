"""Text and token ids: tokenizers, chat templates, and detokenization of answers as they stream."""

from __future__ import annotations

from penstock.text.chat import ChatTemplate
from penstock.text.detok import TextStream
from penstock.text.text import Text
from penstock.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Text", "TextStream", "Tokenizer"]
