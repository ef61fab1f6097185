"""What an experiment needs of a machine that is not here: memory, messages, time, money.

One way: a topology names chips (chips.py), an experiment becomes programs compiled for them (programs.py), what these do is read from
their text (hlo.py), what that takes at least follows from the chips' rates (roofline.py); plan.py puts it on a page, search.py
compares pages.
"""
