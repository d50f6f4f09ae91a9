"""What speculation comes to: formulas, and the decoder in virtual time."""
