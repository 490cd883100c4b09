"""Epochs, and the process groups that outlive them.

============  ==================================================================================
``epoch``     the record of an epoch: who is bound to which slot, and where they meet (pure)
``groups``    stable handles: the transport beneath a live ProcessGroup is exchanged in place
``alone``     torch's ``fake`` backend, on which a newcomer runs Megatron's start-up by itself
============  ==================================================================================
"""
