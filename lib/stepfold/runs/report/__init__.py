"""The report of a run: a page of its metrics, times and events.

`read.py` reads a run, and `render.py` puts it into `page.html`, whose script draws the curves.
"""
