"""Orpheus: a Llama that writes the codes of an audio codec, and the codec that makes sound of them."""
