"""What rank 0 tells its agent as the job goes on; the link is a list."""

from types import SimpleNamespace

from megatron_resilience.hotswap.asker import Asker
from megatron_resilience.vps.layout import Layout


class Link:
    """Stands for the way to the agent."""

    def __init__(self):
        self.training_world, self.training_epoch, self.given_up = 1, 1, 0
        self.sent = []

    def send(self, kind, **fields):
        self.sent.append((kind, fields))


def asker(rank=0):
    """With layouts for less nodes that follow the batch, as DP would."""
    link, batches = Link(), [4]
    live = SimpleNamespace(state=SimpleNamespace(rank=rank), layout=Layout(dp=4), batch=lambda: batches[-1])
    made = Asker(link, live, (), lambda: {1: Layout(dp=batches[-1])})
    return made, link, batches


def test_layouts_for_fewer_nodes_are_told_once_and_again_for_another_batch_or_world():
    made, link, batches = asker()
    made.enter(1)
    made.enter(2)
    assert link.sent == [("fallbacks", {"epoch": 1, "layouts": {1: ["TP1·PP1·DP4", 4]}})]
    batches.append(6)
    made.enter(3)
    made.enter(4)
    assert link.sent[1:] == [("fallbacks", {"epoch": 1, "layouts": {1: ["TP1·PP1·DP6", 6]}})]
    link.training_world = link.training_epoch = 2
    made.enter(5)
    assert link.sent[2:] == [("fallbacks", {"epoch": 2, "layouts": {1: ["TP1·PP1·DP6", 6]}})]


def test_one_rank_speaks_for_all():
    made, link, _ = asker(rank=1)
    made.enter(1)
    assert not link.sent
