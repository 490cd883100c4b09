"""Changing the parallel layout, or the size of the job, while it trains (``--hotswap-parallelism``).

A world is a layout and the processes that train in it. The next world starts in the background, on torch's ``fake``
backend, while this one trains; at an agreed step this one's ranks park with their state sealed in their node's memory, the
next one's ranks read it there (or get it from another node), verify, and go on. Until then the old world is whole.

* ``flags`` — the training script's arguments under another layout (pure)
* ``schedule`` — when which layout is wanted (pure)
* ``streams`` — where a rank's random streams come from (pure)
* ``shelf`` — a rank's sealed state as others read it: by logical tensor
* ``engine`` — carries out a routing plan: packs, sends, receives, unpacks, compares
* ``arrival`` — the new world's side of a switch
"""
