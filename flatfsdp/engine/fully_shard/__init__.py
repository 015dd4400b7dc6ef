"""The parts of `flatfsdp.fully_shard`: arguments, classes swapped in place, moves, copies and pickles of such
modules. Imports `dtensor`, `wrapping`, `facade` and what these import; the public module has the signatures."""
