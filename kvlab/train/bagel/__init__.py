"""BAGEL in small."""
