"""Benchmarks: `make bench`. One JSON line each, measured against the bare floor in the same run, interleaved.

The floor is one autocommit INSERT on the same server with fsync on. Ratios are what counts: machines differ, and are
shared. Where a number has a limit, the line says so, and the command ends with 1 if one is exceeded.
"""
