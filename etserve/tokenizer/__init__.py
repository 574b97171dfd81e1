"""Text to tokens and back, exactly: tokenizers, chat templates, streaming text, stop strings. No torch."""

from etserve.tokenizer.detokenizer import IncrementalDetokenizer
from etserve.tokenizer.loading import load_tokenizer
from etserve.tokenizer.stop import StopMatch, StopMatcher
from etserve.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopMatch", "StopMatcher", "Tokenizer", "load_tokenizer"]
