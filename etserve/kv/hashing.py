"""Names of block contents: a SHA-256 chain over full blocks, salted at its root.

A block's key names all tokens up to its end, so equal keys mean equal keys and values.
"""

import hashlib
import struct

from etserve.config import BLOCK_SIZE

_TOKENS = struct.Struct(f"<{BLOCK_SIZE}q")
_ROOT = b"etserve kv block chain\0"


class BlockChain:
    """The keys of one sequence's full blocks, each hashed once, as they fill."""

    __slots__ = ("_last", "keys")

    def __init__(self, salt: bytes) -> None:
        self.keys: list[bytes] = []  # keys[i] names tokens [0, (i + 1) * BLOCK_SIZE)
        self._last = hashlib.sha256(_ROOT + salt).digest()

    def extend(self, token_ids: list[int], num_tokens: int) -> list[bytes]:
        """Hash what is full among the first `num_tokens` and not hashed yet; return all keys so far.

        `token_ids` may have grown since the last call, never changed.
        """
        keys = self.keys
        for start in range(len(keys) * BLOCK_SIZE, num_tokens - BLOCK_SIZE + 1, BLOCK_SIZE):
            packed = _TOKENS.pack(*token_ids[start : start + BLOCK_SIZE])
            self._last = hashlib.sha256(self._last + packed).digest()
            keys.append(self._last)
        return keys
