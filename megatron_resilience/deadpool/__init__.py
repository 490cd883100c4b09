"""Keeping a job alive: in-memory copies of every generation, and what happens when somebody dies.

==============  ===============================================================================
``config``      the settings, validated together (pure)
``placement``   who keeps a copy of whose state (pure)
``recovery``    which generation to resume from, and who has it (pure)
``protection``  copies each generation to host memory and to a partner, behind the next step
``session``     one rank's life: join an epoch, train, be interrupted, join the next
==============  ===============================================================================
"""
