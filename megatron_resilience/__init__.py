"""Keeps a Megatron-LM pretraining job alive when nodes die, and changes its layout while it trains.

Importing this package changes nothing. The rooms:

===================  =====================================================================
``arguments``        the flags, as one frozen and validated configuration
``state``            what a rank's training state is, generations, shared-memory segments
``vps``              the Virtual Parameter Space: boxes, parameters, layouts (pure)
``routing``          who sends what to whom: plans, stages, schedules, cost (pure)
``transport``        moving bytes: gloo, NCCL
``deadpool``         snapshot, replication, placement, recovery
``topology``         epochs and the stable handles of process groups
``control``          agents, coordinator, zygote, command line
``preflight``        what a job's protection takes, and whether it will hold, before it starts
``patch``            the import line in a Megatron-LM checkout
``accelerator``      CUDA, and a CPU stand-in that trains real Megatron on gloo
``megatron_adapter`` the only importer of Megatron
``observe``          events, summaries, traces
===================  =====================================================================
"""

from megatron_resilience.version import __version__

__all__ = ["__version__"]
