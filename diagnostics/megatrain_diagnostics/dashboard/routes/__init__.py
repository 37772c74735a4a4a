"""One file a view, thin: check the question, ask the source, call the view, answer."""
