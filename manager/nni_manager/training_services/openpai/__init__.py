"""OpenPAI: its job protocol v2, as data.

`protocol.parse` reads a job and reports all errors at once; `render.render` makes the scripts of its tasks;
`export` writes a job as text again, with its secrets masked.
"""
