"""Runs of a real launcher and real ranks that are struck by a fault at one moment, and what has to be true behind it.

case    what is run, what strikes it and when: drawn by a number, written as one line
cover   cases in which each pair of choices meets
hosts   cases on several hosts, as network namespaces, of which one is struck
judge   runs a case and says what is not as it has to be
rank    what each rank does, and the strike
warm    a launcher whose ranks are forked, with torch imported, and no programs that begin anew

`python -m tests.chaos.case 17` runs the case of that number, `python -m tests.chaos.case "layout=zero3 ..."` the one
that the line says.
"""
