"""TextStream where most tokens are no text: what a model of speech generates."""

from __future__ import annotations

from kvlab.engine.text import TextStream


def decode(ids):
    return "".join(chr(i) for i in ids if i < 128)


def test_tokens_without_text_are_not_decoded_again_and_again():
    decoded = []

    def counting(ids):
        decoded.append(len(ids))
        return decode(ids)

    stream = TextStream(counting)
    for _ in range(2000):
        stream.push(500)
    assert sum(decoded) < 2000 * 200


def test_text_after_many_tokens_without_any_is_whole():
    stream = TextStream(decode)
    pieces = [stream.push(i) for i in [104, *[500] * 300, 105, 500, 106]]
    assert "".join(pieces) == stream.text == "hij"
