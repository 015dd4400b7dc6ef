"""Methods of the wrapper, in groups: signatures, documentation, delegation. Imports `state` and what it imports."""
