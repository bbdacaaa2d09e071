"""The processes between gspo and a candidate program.

``supervise.py`` is started as a script. gspo imports nothing from here, and only the standard library is imported here,
so that it starts in a few hundredths of a second.
"""
