"""Twenty keys of format v1, computed from its description alone. Prints the known-answer file beside it.

This script imports nothing of kvlab and must stay so: it is the second opinion on the format.
"""

import hashlib
import json
import struct

FORMAT = "kvlab keys v1"


def field(data):
    return struct.pack("<I", len(data)) + data


def sha(*fields):
    return hashlib.sha256(b"".join(map(field, fields))).digest()


def key(prev, ids, items=()):
    media = b"".join(struct.pack("<III", start, offset, length) + field(digest) for start, offset, length, digest in items)
    return sha(prev, struct.pack(f"<{len(ids)}I", *ids), media)


def text_chain(ids, page_size):
    keys = [b""]
    for start in range(0, len(ids), page_size):
        keys.append(key(keys[-1], ids[start : start + page_size]))
    return keys[1:]


def settings(**values):
    parts = []
    for name in sorted(values):
        parts += [name.encode(), sha(type(values[name]).__name__.encode(), str(values[name]).encode())]
    return sha(*parts)


def main():
    answers = {}
    for number, k in enumerate(text_chain([(7 * i * i + 3) % 49152 for i in range(70)], 16)):
        answers[f"text of 70 ids, page 16, page {number}"] = k
    for number, k in enumerate(text_chain([5, 6, 7, 8, 9, 10, 11, 12, 13], 4)):
        answers[f"text of 9 ids, page 4, page {number}"] = k

    # text 20, picture 30, text 25 in pages of 16
    ids, red = list(range(100, 145)), hashlib.sha256(b"red").digest()
    k = key(b"", ids[:16])
    answers["picture layout, page 0"] = k
    k = key(k, ids[16:20], [(4, 0, 30, red)])
    answers["picture layout, page 1"] = k
    k = middle = key(k, [], [(0, 12, 30, red)])
    answers["picture layout, page 2"] = k
    k = key(k, ids[20:34], [(0, 28, 30, red)])
    answers["picture layout, page 3"] = k
    k = key(k, ids[34:])
    answers["picture layout, page 4"] = k
    answers["picture layout, end of the picture"] = key(middle, [], [(0, 28, 30, red)])

    answers["smallest and largest id"] = key(b"", [0, 2**32 - 1])
    answers["fingerprint of mixed fields"] = sha("größe".encode(), b"16", b"\x00\xff")
    kv = settings(page_size=16, dtype="float32", world_size=1)
    rope = settings(rope_theta=10000.0)
    base = sha(
        FORMAT.encode(),
        *(b"checkpoint", sha(b"toy", bytes(32))),
        *(b"preprocess", b"TextModel"),
        *(b"kv", kv),
        *(b"planned", sha(b"positions", rope)),
    )
    answers["base root"] = base
    answers["root of main"] = sha(base, b"label", b"main", b"salt", b"")
    answers["root of cfg_img"] = sha(base, b"label", b"cfg_img", b"salt", b"")
    answers["root of cfg_img with salt"] = sha(base, b"label", b"cfg_img", b"salt", b"tenant-a")
    print(json.dumps({"format": FORMAT, "keys": {name: k.hex() for name, k in answers.items()}}, indent=1))


if __name__ == "__main__":
    main()
