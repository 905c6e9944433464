"""OpenPAI: its job protocol v2, as data.

`protocol.parse` reads a job and reports every mistake in it at once; `render.render` makes the scripts of its tasks;
`export` writes a job down again, with all that nobody here knows about.
"""
