"""What an experiment needs on a machine that you do not have: memory, collectives, time and price.

A topology names chips (chips.py). The experiment's programs are compiled for them (programs.py).
Their text (hlo.py) shows their work (work.py), and the chips' rates give the least time of that
work (roofline.py). plan.py combines all, page.py prints it, search.py compares plans."""
