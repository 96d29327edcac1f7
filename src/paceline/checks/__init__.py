"""The doctor: what will go wrong on these hosts and in this script, and the line that mends it.

findings.py results.py    what a check says; the list of all checks; reference.py makes their page
examine.py quick.py       the whole examination, and the look that every run takes
details.py host_states.py what is read on a host; host.py surroundings.py gpu.py differences.py identities.py judge it
pairs.py ports.py links.py ends.py matrix.py   every pair of hosts; together.py all of them
script.py rules_*.py      what goes wrong in a training script, which is read and never run

Run on hosts: details*.py calls.py and the *_errand.py.
"""
