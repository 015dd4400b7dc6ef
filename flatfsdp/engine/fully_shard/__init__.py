"""What `flatfsdp.fully_shard` consists of: arguments, classes swapped in place, moves, copies and pickles of such
modules. Imports `dtensor`, `wrapping`, `facade` and what these import; the public module has the signatures."""
