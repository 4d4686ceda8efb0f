"""Chooses the workers of a pool by running the real scheduler on a virtual clock.

    Problem -> layouts -> lower bound (orders and prunes) -> simulation (ranks) -> Plan

`problem.py` has the problem, `memory.py` a layout and its bytes on each device, and `search.py` all layouts, their
bound and the search.
"""
