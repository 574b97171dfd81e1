"""Random draws keyed by what is drawn, so that tokens depend on nothing that happens around them."""

import hashlib
import struct

_KEY = struct.Struct("<QQQ")
_WORD = struct.Struct("<Q")
_MASK_64 = (1 << 64) - 1


def uniform(seed: int, position: int, choice: int) -> float:
    """Return the draw in [0, 1) that belongs to one output position of one choice under a request's seed.

    53 bits of BLAKE2b over the three numbers (each modulo 2^64): the same on every platform, in any order of calls.
    """
    key = _KEY.pack(seed & _MASK_64, position & _MASK_64, choice & _MASK_64)
    (word,) = _WORD.unpack(hashlib.blake2b(key, digest_size=8, person=b"etserve.draw").digest())
    return float(word >> 11) * 2.0**-53
