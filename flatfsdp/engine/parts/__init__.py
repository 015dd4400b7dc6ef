"""Parts of whole tensors, as other dimensions of a mesh cut them, and the strides of tensors that are cut by rows, in
integers only. Imports `layout`, and flatfsdp's errors.
"""
