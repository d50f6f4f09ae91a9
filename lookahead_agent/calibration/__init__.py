"""How strict a verifier must be for a stated risk: pairs of steps, what followed from them, and thresholds."""
