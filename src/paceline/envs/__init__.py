"""The environment of one host, made on the others.

inventory.py listing.py pulling.py   run on the host that has it: what is installed, in which files
looking.py making.py scripts.py      run on a host that is to get it
listed.py    what that host has said of its files, checked
lock.py      what exactly is to be installed, and the name that follows from it
sending.py fetching.py   the files' way
sync.py      the whole of it
table.py     which packages differ between hosts
"""
