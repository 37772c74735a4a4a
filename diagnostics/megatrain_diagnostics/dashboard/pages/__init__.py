"""One folder a page of the dashboard, and one for each question that all pages ask (job, live, session, health).

`document.py` has the types of what is answered: the contract with the page, and with programs. `view.py` makes them, by
pure functions of what is known of a job. `route.py` is thin: it checks the question, asks the source, calls the view.

Times are unix seconds (`_unix_s`), durations seconds (`_s`), ratios parts of one; null is "not known". A field is never
given another meaning: what changes gets another name.
"""
