"""Orpheus: a Llama that writes the codes of an audio codec, and the codec that makes sound of them.

engine = kvlab.load("canopylabs/orpheus-3b-0.1-ft")   # or a folder
for chunk in speak(engine, "Hello there.", voice="leo"):
    ...                                               # 16-bit samples, 85 ms at a time
say(engine, "Hello there.").save("hello.wav")
"""

from __future__ import annotations

from kvlab.models.orpheus.sound import AudioChunk, Speech, write_wav
from kvlab.models.orpheus.stream import SpeechStream, collect, say, speak, together

__all__ = ["speak", "say", "together", "collect", "write_wav", "AudioChunk", "Speech", "SpeechStream"]
