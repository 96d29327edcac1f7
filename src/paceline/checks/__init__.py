"""The doctor: what will go wrong on these hosts, and the line that mends it.

findings.py      what a check finds, and the list of all checks
script.py        reads a training script; the rules are in rules_*.py
"""
