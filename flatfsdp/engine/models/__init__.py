"""Models as code outside of a step sees them: which units a tree of modules has inside, which unit owns a parameter,
over which ranks all of it is spread, what these compare of it, and `rest`, the door for everything that happens between
iterations.

The drivers of steps know nothing of it. Imports `runtime`, `agreement`, `transforms` and what these import, and
`planning`; guards, state dicts, features and the public surfaces import it.
"""
