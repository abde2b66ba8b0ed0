"""JSON text without blanks, in ASCII, by encoders that are made once.

``JSONEncoder.encode`` makes a C encoder for each value, which for the small values of calls costs as much as the
writing; ``json.encoder`` has had it under this name since Python 2.7, and an interpreter without it takes the long way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json import encoder
from typing import Any


def _writer(*, allow_nan: bool, sort_keys: bool) -> Callable[[Any], str]:
    plain = json.JSONEncoder(
        allow_nan=allow_nan, check_circular=False, separators=(",", ":"), sort_keys=sort_keys
    )
    make = getattr(encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    escape = encoder.encode_basestring_ascii
    pieces = make(None, plain.default, escape, None, ":", ",", sort_keys, False, allow_nan)
    join = "".join
    return lambda value: join(pieces(value, 0))


dumps = _writer(allow_nan=False, sort_keys=False)
dumps_sorted = _writer(allow_nan=True, sort_keys=True)
