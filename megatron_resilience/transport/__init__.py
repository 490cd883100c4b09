"""Moving bytes between ranks.

========  =========================================================================================
``base``  the fabric of one epoch: builds backends for groups of ranks, aborts them together
``gloo``  over TCP; on CPU, and for host memory on GPU machines
``nccl``  for device tensors (written for real, not yet run on a GPU: see the README's support table)
``store`` the rendezvous of one epoch
========  =========================================================================================
"""
