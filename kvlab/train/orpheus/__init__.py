"""Orpheus in small."""
