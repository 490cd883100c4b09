"""``megatron-resilience preflight``: what protection will take, and whether it will hold, before anything is started.

=============  ===================================================================================
``changes``    what changes of layout will take
``job``        what is to run: model, layout, nodes, time limits, hardware; from a YAML file
``arguments``  the same from the arguments of ``launch`` and of the training script
``estimate``   bytes and seconds (pure)
``rules``      what is refused, and what is warned of, each with its remedy (pure)
``machine``    what this machine is like: limits, memory, environment
``command``    the command
=============  ===================================================================================
"""
