"""Chips, and programs compiled for them: what a program costs, from the compiler's own text and stated arithmetic.

chips.py     facts of each chip           topology.py     devices of a slice that is not here
hlo.py       the text of a program        costs.py        its seconds, by what they are spent on
counting.py  its matrix products          calibration.py  what plain matrix products reach by the same estimate
"""
