"""A world of coloured shapes: GenEval prompts, pictures that satisfy them, and their reader."""
