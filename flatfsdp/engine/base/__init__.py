"""Events, hashes, wait limits, plain data, nested structures, identities of processes, and the only files that use
private names of torch or register autograd hooks. Imports flatfsdp's errors, and no other package of the engine.
"""
