"""Rewards over HTTP: a server that scores in separate processes, and the reward "served", its client."""
