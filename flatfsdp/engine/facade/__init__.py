"""Methods of the wrapper, in groups: signatures, documentation, delegation. Imports `features` and what it imports."""
