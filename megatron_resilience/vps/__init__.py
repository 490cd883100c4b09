"""The Virtual Parameter Space: what exists once and whole, and which rank has which part of it (pure).

``boxes`` the algebra · ``tensors`` logical tensors and cuts · ``catalogue`` all of a model's · ``families``
written down from a description · ``layout`` parallel sizes and rank numbers · ``stages`` layers to stages ·
``flat`` distributed-optimizer buffers · ``instances`` where each tensor lies · ``pieces`` boxes in bulk ·
``space`` ranks to boxes, and boxes to ranks.
"""
