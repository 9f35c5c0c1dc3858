"""Looking at a root from outside, without torch: what lies there, what is in it, whether it is whole.

Reads only.  Everything here gives values; how they are shown is for the command line.
"""
