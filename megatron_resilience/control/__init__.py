"""Who is alive, who does what, and the processes of a node.

================== ==============================================================================
``cli``            ``megatron-resilience COMMAND ...``
``commands``       what people ask a job: status, events, drain, swap, outcome
``client``         finds the agent that leads, and asks it
``desk``           the other end: answers, or says who leads
``status``         one look at a job, as an object and as text (pure)
``jobdir``         the folder of one job: secret, events, addresses, outcome
``options``        the launcher's options, validated (pure)
``launcher``       starts this node's agent, or all of them on one machine
``agent``          one per node: its ranks, its memory
``star``           ... its place among the agents: connections, who leads next
``node``           ... its processes and its memory, without knowing why
``overseer``       ... its eye on them: who is frozen, who makes no progress
``watch``          ... for how long (pure)
``stacks``         ... and where in Python
``health``         what devices say of themselves, judged (pure)
``nvml``           reads them, where there is a driver
``hang``           which rank the others wait for (pure)
``survey``         asks all nodes for it
``classification`` what a fault means, by one table (pure)
``membership``     who leads, and when a side may go on without the other (pure)
``coordinator``    decides: events in, actions out (pure); built upon the three that follow
``layouts``        ... changes of layout (pure); ``switching`` is the state of one
``epochs``         ... from one epoch to the next (pure)
``record``         ... what is known of a job, and handed to a successor
``events``         those events and actions
``leader``         the thin process around the coordinator, in one of the agents
``addresses``      sockets of the configured interface
``peers``          authenticated messages between agents
``channel``        messages and descriptors between an agent and a process of its node
``zygote``         forks ranks from one pre-imported process
``link``           a rank's end of its channel
================== ==============================================================================
"""
