"""Sampling, evaluation and export of base or trained models."""
