"""One folder for each subject of the API: most serve one view, some serve all (job, live, session, health, marks).

docs/glossary.md says what a page, a view, a chart, a picture and a topic are.

`document.py` has the types of the responses: the contract with the page and with programs. `view.py` makes the
documents with pure functions of a job's data. `route.py` is thin: it checks the request, asks the source and calls
`view.py`.

Times are unix seconds (`_unix_s`), durations are seconds (`_s`), ratios are fractions of one, and null is "not known".
A field never changes its meaning: a changed field gets another name.
"""
