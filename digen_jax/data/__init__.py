"""Prompt files: read and checked (`files`), cached and streamed (`dataset`)."""
