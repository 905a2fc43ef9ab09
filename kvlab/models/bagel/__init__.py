"""BAGEL: one decoder that reads texts and pictures and draws pictures, over pages."""
