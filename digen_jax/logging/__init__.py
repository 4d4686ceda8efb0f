"""Metrics, images, timeline, status and report of a run."""
