"""Running a model under policies: teacher-forced lockstep windows, and generation.

Owns the order of forward passes, token choice and what is handed to a study. Read `lockstep.py`
first.
"""
