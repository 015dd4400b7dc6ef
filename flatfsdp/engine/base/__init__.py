"""Events, hashes, wait limits, plain data, old module names, and the only files that use private names of torch or
register autograd hooks. Imports flatfsdp's errors, and no other package of the engine.
"""
