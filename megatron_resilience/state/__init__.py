"""What a rank's training state is, where its copies live, and when a copy may be overwritten.

=============  ==========================================================================
``inventory``  the named tensors of a rank's state and their place in a segment (pure)
``segment``    a slot: header, checksum, sealed last
``memory``     anonymous shared memory that dies with the node's processes
``ledger``     which of the two slots may be written, and what is committed (pure)
=============  ==========================================================================
"""
