"""One module for each subject of the API: most serve one view, some serve all (job, live, session, health, marks).

docs/glossary.md defines page, view, chart, picture and topic.

A module has three parts, in this order: the types of the responses, which are the contract with the page and with
programs; pure functions that make these documents from a job's data; and `router`, which is thin: it checks the
request, asks the source and calls the functions. A subject of more than about 300 lines is a folder with a file for
each part: `document.py`, `view.py` and `route.py`.

Times are unix seconds (`_unix_s`), durations are seconds (`_s`), ratios are fractions of one, and null is "not known".
A field never changes its meaning: a changed field gets another name.
"""
